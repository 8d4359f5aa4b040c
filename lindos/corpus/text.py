"""Documents from files, folders and JSON Lines, read strictly: what cannot be read is named, never skipped.

Three kinds of source:

- **a folder**, searched recursively in sorted order for files that end in `.txt`, `.md`, `.rst`, `.py` or `.jsonl`.
  Hidden files and folders (`.git`) and `__pycache__` are left out, other suffixes are not looked at, empty files are
  passed over, symbolic links to folders are not followed;
- **a `.jsonl` file**: one JSON object a line, one document each, its text under `field`. Blank lines and empty texts
  are passed over;
- **any other file**: one document, UTF-8, whatever its suffix. `.json` alone is refused, since nobody can tell which
  of its strings are the text.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lindos.core.errors import DataError, nearest

FOLDER_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")

PathLike = str | os.PathLike[str]


class Document(NamedTuple):
    """One text and where it came from (a path, for JSON Lines `path:line`)."""

    source: str
    text: str


def documents(paths: PathLike | Iterable[PathLike], *, field: str = "text") -> Iterator[Document]:
    """Yields the documents of files, folders and JSON Lines files, in the order given.

    Folders are walked in sorted order, so the same tree gives the same documents on every machine. JSON Lines are
    streamed; any other file is read whole. Text is passed on as it stands (line ends too), only a leading byte order
    mark is dropped.

    Args:
        paths: one path or several.
        field: the key of the text in each object of a `.jsonl` file.

    Raises:
        DataError: a path is missing; a file is empty or a folder has no text; a file is binary or not UTF-8 (names the
            byte offset); a JSON line is cut, malformed, or has no text under `field` (names the line).

    Example:
        >>> [text for _, text in documents("notes/")]  # doctest: +SKIP
    """
    for path in _listed(paths):
        found = False
        for file in _files(path):
            for document in _read(file, field):
                found = True
                yield document
        if not found:
            kind = (
                f"folder without text in {', '.join(FOLDER_SUFFIXES)} files" if path.is_dir() else "file without text"
            )
            raise DataError(f"every path must hold text, got {path}: a {kind}. Remove it from the list or fill it.")


def standard_library() -> list[Path]:
    """The Python files of the running interpreter's standard library: a corpus that needs no download.

    About 1,700 files, 31 MB, of varied code and English. Site-packages are left out; empty files and those that are
    not UTF-8 (test data, on purpose) are passed over here, and only here. The list is sorted by path.

    Returns:
        Paths for `documents`, `train` and `build`.

    Raises:
        DataError: this interpreter keeps its standard library elsewhere than in readable .py files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for file in _walk(root, (".py",), leave_out=frozenset({"site-packages", "dist-packages"})):
        data = file.read_bytes()
        if data.strip() and _bad_offset(data) is None:
            paths.append(file)
    if not paths:
        raise DataError(
            f"the standard library must lie in .py files, found none under {root} (a zipped or frozen Python?). "
            "Give a folder of text instead."
        )
    return paths


def _listed(paths: PathLike | Iterable[PathLike]) -> list[Path]:
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not several:
        raise DataError("documents need at least one path, got an empty list. Give files or folders of text.")
    return [Path(path) for path in several]


def _files(path: Path) -> Iterable[Path]:
    if path.is_dir():
        return _walk(path, FOLDER_SUFFIXES)
    if path.is_file():
        return [path]
    if path.exists():
        raise DataError(f"a source of text must be a file or a folder, got {path}. Give one of those.")
    known = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = nearest(path.name, known).partition(" Known")[0] if known else ""
    hint = hint if hint.startswith("did") else f"{path.parent} {'exists' if known else 'is missing or empty'}"
    raise DataError(f"every path must exist, got {path}: {hint}. Check the spelling.")


def _walk(root: Path, suffixes: tuple[str, ...], leave_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below root, sorted by the parts of their paths."""

    def stop(error: OSError):
        raise DataError(f"every folder must be readable, got {error.filename}: {error.strerror}.") from error

    found = []
    for folder, names, files in os.walk(root, onerror=stop):
        names[:] = [name for name in names if not name.startswith((".", "__pycache__")) and name not in leave_out]
        found += [Path(folder, name) for name in files if name.endswith(suffixes) and not name.startswith(".")]
    return iter(sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).parts))


def _read(file: Path, field: str) -> Iterator[Document]:
    if file.suffix == ".jsonl":
        yield from _read_lines(file, field)
        return
    if file.suffix == ".json":
        raise DataError(
            f"JSON must come as JSON Lines, got {file}. Write one object a line with the text under {field!r} to a "
            ".jsonl file."
        )
    text = _decoded(_opened(file), str(file), at_byte=0)
    if text and not text.isspace():
        yield Document(str(file), text)


def _opened(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"every file must be readable, got {file}: {error.strerror}.") from error


def _read_lines(file: Path, field: str) -> Iterator[Document]:
    at_byte = 0
    try:
        stream = file.open("rb")
    except OSError as error:
        raise DataError(f"every file must be readable, got {file}: {error.strerror}.") from error
    with stream:
        for number, line in enumerate(stream, start=1):
            text = _decoded(line, f"{file}, line {number}", at_byte, cut=not line.endswith(b"\n"))
            at_byte += len(line)
            if text and not text.isspace():
                text = _text_of_line(text, file, number, field)
                if text and not text.isspace():
                    yield Document(f"{file}:{number}", text)


def _text_of_line(line: str, file: Path, number: int, field: str) -> str:
    """The text under `field` of one JSON line, or a DataError that names the line."""
    where = f"{file}, line {number}"
    try:
        item = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        if not line.endswith("\n"):
            raise DataError(
                f"the last line of JSON Lines must be whole, got {where}: cut after {len(line)} characters ({reason}). "
                "Copy the file again, or delete that line."
            ) from error
        column = getattr(error, "colno", 1)
        raise DataError(
            f"each line must be one JSON object, got {where}, column {column}: {reason}. Mend or delete that line."
        ) from error
    if not isinstance(item, dict):
        raise DataError(
            f"each line must be one JSON object, got {where}: a {type(item).__name__}. Use {{{field!r}: ...}}."
        )
    if field not in item:
        raise DataError(
            f"each line must hold its text under {field!r}, got {where} without it: {nearest(field, map(str, item))}. "
            "Name the right one with field=."
        )
    text = item[field]
    if not isinstance(text, str):
        raise DataError(
            f"{field!r} must be a string, got {where}: a {type(text).__name__}. Name another one with field=."
        )
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError(
            f"text must be valid Unicode, got {where}: half of a surrogate pair (an escape like \\ud83d alone). "
            "Mend or delete that line."
        )
    return text


def _decoded(data: bytes, where: str, at_byte: int, cut: bool = False) -> str:
    """The UTF-8 text of bytes that begin `at_byte` bytes into a file; `cut` if the file ends with them."""
    offset = _bad_offset(data)
    if offset is not None:
        shown = f"byte 0x{data[offset]:02x} at byte offset {at_byte + offset}"
        if cut and len(data) - offset < 4 and data[offset] >= 0xC2:
            reason = f"{shown} begins a character that the end of the file cuts. Copy the file again"
        elif data.startswith((b"\xff\xfe", b"\xfe\xff")):
            reason = f"{shown} is the mark of UTF-16. Save it as UTF-8"
        elif data[offset] == 0:
            reason = f"{shown}: a binary file. Leave it out, or convert it to text"
        else:
            reason = f"{shown}: a binary file or another encoding. Leave it out, or save it as UTF-8"
        raise DataError(f"text must be UTF-8 without NUL, got {where}: {reason}.")
    text = data.decode("utf-8")
    return text.removeprefix("\ufeff") if at_byte == 0 else text


def _bad_offset(data: bytes) -> int | None:
    """Offset of the first byte that is NUL or not UTF-8, or None."""
    zero = data.find(b"\0")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start if zero < 0 else min(zero, error.start)
    return zero if zero >= 0 else None
