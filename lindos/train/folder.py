"""The folder of a run: what it must be before a run starts, its checkpoints, and what a resumed run must share.

```
run/
  run.json           what a resumed run must have in common with the one before
  config.toml        the whole configuration; `lindos pretrain run/config.toml` repeats the run
  corpus/            token shards, unless data names them
  step-500/ ...      checkpoints
  metrics.jsonl
  model/             the export
```
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from lindos.core.errors import CheckpointError, InputError
from lindos.train.config import Config

MANIFEST_FILE = "manifest.json"
RUN_FILE = "run.json"
CONFIG_FILE = "config.toml"
CORPUS_FOLDER = "corpus"
MODEL_FOLDER = "model"
_STEP = re.compile(r"step-([0-9]+)")


def prepare(folder: Path, resume: str) -> None:
    """Makes the folder, or accepts one that a resumed run continues.

    Raises:
        InputError: the folder holds something and the run does not resume, or resume names no checkpoint.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--run must name a folder, got the file {folder}.")
    if resume == "never" and folder.is_dir() and any(folder.iterdir()):
        raise InputError(
            f"the run folder must be new or empty, got {folder} with {len(list(folder.iterdir()))} entries. "
            "Use --resume auto to continue it, or another --run."
        )
    if resume not in ("never", "auto") and not Path(resume).is_dir():
        raise InputError(f"--resume must be never, auto or the folder of a checkpoint, got {resume!r}: no such folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the run folder {folder} cannot be made: {error.strerror}.") from error


def checkpoint(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step}"


def step_of(path: Path) -> int:
    """The step of a checkpoint, from its manifest.

    Raises:
        CheckpointError: no manifest, one that cannot be read, or one without a step.
    """
    file = path / MANIFEST_FILE
    if not file.is_file():
        raise CheckpointError(f"a checkpoint must hold {MANIFEST_FILE}, got {path} without it: it is incomplete.")
    try:
        return int(json.loads(file.read_text("utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the manifest of a checkpoint must be readable, got {file}: {error!r}.") from error


def candidates(folder: Path, resume: str) -> tuple[list[tuple[int, Path]], list[str]]:
    """Checkpoints to continue from, the newest first, and why others are passed over.

    Raises:
        CheckpointError: resume names a folder that is no checkpoint.
    """
    if resume == "never":
        return [], []
    if resume != "auto":
        return [(step_of(Path(resume)), Path(resume))], []
    found, passed = [], []
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    for _, path in sorted(numbered, reverse=True):
        try:
            found.append((step_of(path), path))
        except CheckpointError as error:
            passed.append(f"passed over {path.name}: {error}")
    return found, passed


def checkpoint_in(path: Path) -> tuple[Path, Path]:
    """The run folder and the checkpoint that a path means: RUN/step-N, or RUN for its newest.

    Raises:
        CheckpointError: neither.
    """
    if (path / MANIFEST_FILE).is_file():
        return path.absolute().parent, path
    found, passed = candidates(path, "auto") if path.is_dir() else ([], [])
    if not found:
        why = f" ({'; '.join(passed)})" if passed else ""
        raise CheckpointError(f"expected a checkpoint or the folder of a run with one, got {path}{why}.")
    return path, found[0][1]


def configuration_of(folder: Path) -> Config:
    """The configuration that a run was started with.

    Raises:
        InputError: the folder is not of a run.
    """
    from lindos.train.reading import configure

    file = folder / CONFIG_FILE
    if not file.is_file():
        raise InputError(f"the folder of a run must hold {CONFIG_FILE}, got {folder} without it.")
    return replace(configure([str(file)]), run=str(folder))


def drop_old(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` complete checkpoints; 0 keeps all."""
    if not keep:
        return
    complete, _ = candidates(folder, "auto")
    for _, path in complete[keep:]:
        (path / MANIFEST_FILE).unlink()  # first, so that a kill leaves no folder that looks complete
        shutil.rmtree(path)


def set_aside(path: Path) -> None:
    """Renames what stands where a checkpoint is to be written: one that was passed over because it is damaged."""
    number = 0
    while path.exists():
        aside = path.with_name(f"{path.name}.damaged" + (f".{number}" if number else ""))
        if not aside.exists():
            path.rename(aside)
        number += 1


def remove(path: Path) -> None:
    """Removes the export of the run before."""
    if path.is_dir():
        shutil.rmtree(path)


def compare(folder: Path, facts: dict[str, Any], resumed: bool) -> None:
    """Keeps the facts that decide which rows a step sees; on a resumed run they must be those of before.

    Raises:
        InputError: names what differs.
    """
    file = folder / RUN_FILE
    if resumed and file.is_file():
        before = json.loads(file.read_text("utf-8"))
        for name, value in facts.items():
            if before.get(name) != value:
                raise InputError(
                    f"a resumed run must keep {name}: it was {before.get(name)}, got {value}. Use what it was, or "
                    "start another --run."
                )
    file.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
