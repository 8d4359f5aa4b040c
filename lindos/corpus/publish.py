"""Folders that are complete or absent: written beside their destination, renamed onto it at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: what a killed build leaves is then not found again
    fcntl = None

from lindos.core.errors import DataError

_SETTLED_SECONDS = 60  # a folder younger than this may not have its lock yet


def occupied(out: Path) -> bool:
    """Whether `out` is there and not an empty folder.

    Raises:
        DataError: it is a file.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"out must be a folder to make, got {out}: a file. Choose another name.")
    return out.is_dir() and any(out.iterdir())


@contextlib.contextmanager
def unpublished(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, removed at the end unless `publish` moved it.

    It is locked while its process lives, so the next build of the same folder recognises and removes what a killed
    one left behind.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name}.building-"
    for entry in out.parent.iterdir():
        if entry.name.startswith(prefix) and _abandoned(entry):
            shutil.rmtree(entry, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    lock = _locked(folder)
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        if lock is not None:
            os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, out: Path) -> bool:
    """Renames a complete folder to `out`, after its bytes have reached the disk.

    Returns:
        False where another process has meanwhile put something there: `folder` then stays where it is.
    """
    for parent, _, files in os.walk(folder):
        for name in files:
            _flush(Path(parent, name))
        _flush(Path(parent))
    try:
        os.rename(folder, out)
    except OSError:
        if not occupied(out):
            raise
        return False
    _flush(out.parent)
    return True


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder until it is closed; None where someone else holds it."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _abandoned(folder: Path) -> bool:
    try:
        if not folder.is_dir() or time.time() - folder.stat().st_mtime < _SETTLED_SECONDS:
            return False
        lock = _locked(folder)
    except FileNotFoundError:  # its owner finished just now
        return False
    if lock is not None:
        os.close(lock)
    return lock is not None
