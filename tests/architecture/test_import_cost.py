"""`import lindos` is cheap, and brings none of the libraries that are imported late."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys, time
import torch
started = time.perf_counter()
import lindos
print(json.dumps([time.perf_counter() - started, sorted(sys.modules)]))
"""
LATE = {"transformers", "tyro", "rich", "ray", "tokenizers", "datasets", "tensorboard"}


def test_import_lindos():
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
        took, modules = json.loads(done.stdout)
        assert not LATE & set(modules)
        assert "lindos" in modules
        seconds.append(took)
        if took < 1.0:
            return
    raise AssertionError(f"import lindos took {min(seconds):.2f} s beyond torch, at best; it should take under 0.5 s")
