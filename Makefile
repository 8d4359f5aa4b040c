# make demo, make test and make lint set up all they need on a fresh machine with Python 3.10 or newer:
#   make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Ranks are processes: one thread each, or they take the cores from each other.
export OMP_NUM_THREADS := 1

.PHONY: demo test lint setup clean

demo: $(READY)
	$(BIN)/python -m lindos.train.demo

test: lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

setup: $(READY)

# torch comes first and pinned: what the tests were run with.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "lindos needs Python 3.10 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .import_linter_cache
