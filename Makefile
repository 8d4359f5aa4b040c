# make demo, make test and make lint set up all they need on a fresh machine with Python 3.10 or newer:
#   make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Ranks are processes: one thread each, or they take the cores from each other.
export OMP_NUM_THREADS := 1

.PHONY: demo test lint versions setup clean

demo: $(READY)
	$(BIN)/python -m lindos.train.demo

test: lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# Every causal type under tp=2 with three minors of transformers; verdicts go into the table that ships and its page.
MINORS ?= 5.17 5.20 5.24
versions:
	for minor in $(MINORS); do \
	  test -d .venv-$$minor || $(PYTHON) -m venv .venv-$$minor; \
	  .venv-$$minor/bin/python -m pip install torch==2.13.0 && \
	  .venv-$$minor/bin/python -m pip install -e . "transformers==$$minor.*" && \
	  .venv-$$minor/bin/python -m lindos prove --all --tp 2 --table lindos/hf/proven.json --page docs/proven.md || exit 1; \
	done

setup: $(READY)

# torch comes first and pinned: what the tests were run with.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "lindos needs Python 3.10 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .import_linter_cache
