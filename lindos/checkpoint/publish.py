"""A folder that is complete or absent: written under another name beside its place, published by one rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from lindos.checkpoint.files import naming, sync_folder
from lindos.comm.world import World
from lindos.core.errors import CheckpointError

PARTIAL = ".partial"


def publish(path: Path, world: World, write: Callable[[Path], None], finish: Callable[[Path], None]) -> None:
    """All ranks `write(folder)` their files; then rank 0 alone does `finish(folder)` and renames the folder to path.

    Raises:
        CheckpointError: the path exists, or any rank could not write; what was written is removed then.
    """
    folder = path.parent / f".{path.name}{PARTIAL}"
    _on_one(world, lambda: _prepare(path, folder), "open")
    error: Exception | None = None
    try:
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} was made by rank 0 but is not seen here: all ranks must share this file system."
            )
        write(folder)
    except Exception as found:
        error = found
    try:
        world.agree(error, f"write {path.name}")
        _on_one(world, lambda: _finish(path, folder, finish), "publish")
    except Exception:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _on_one(world: World, action: Callable[[], None], name: str) -> None:
    error: Exception | None = None
    if world.rank == 0:
        try:
            action()
        except Exception as found:
            error = found
    world.agree(error, name)


def _prepare(path: Path, folder: Path) -> None:
    if path.exists():
        raise CheckpointError(f"{path} exists. Save under another name, or remove it first.")
    with naming(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()


def _finish(path: Path, folder: Path, finish: Callable[[Path], None]) -> None:
    finish(folder)
    with naming(path):
        sync_folder(folder)
        os.rename(folder, path)
        sync_folder(path.parent)
