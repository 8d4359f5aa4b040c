"""Building token shards: from documents to files that many processes map into memory."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lindos.core.errors import DataError, InputError
from lindos.corpus.index import DTYPES, SPLITS, TOKENIZER_FOLDER, Index, Shard, Split, check_sizes, read_index
from lindos.corpus.pieces import cuts_are_exact, pieces
from lindos.corpus.publish import occupied, publish, unpublished
from lindos.corpus.survey import Survey, digest_of, survey
from lindos.corpus.text import Document, PathLike, documents
from lindos.corpus.tokenizer import Tokenizer, save

Progress = Callable[[int, int], None]

PIECE_CHARACTERS = 1 << 16  # small enough to share out over cores
BATCH_CHARACTERS = 1 << 22  # bounds memory: an encoding takes about 100 bytes a token


def build(
    paths: PathLike | Iterable[PathLike],
    tokenizer: Tokenizer,
    out: PathLike,
    *,
    validation_fraction: float = 0.01,
    shard_tokens: int = 1 << 26,
    field: str = "text",
    progress: Progress | None = None,
) -> Index:
    """Encodes documents into a folder of token shards that `TokenRows` opens.

    The documents are read twice: once to find faults, count, and choose the validation documents; once to encode.
    Each document is followed by the end-of-text token; documents stay in their order and may cross shards. A document
    validates by the hash of its text, so its copies share its side; a corpus too small for that gives up one document,
    or the last part of its largest. If `out` already holds the same documents, tokenizer and settings it is reused.
    Several processes may build the same corpus at once: the first to finish wins, the others reuse. `out` is complete
    or absent, whenever the process ends.

    Args:
        paths: files and folders, as for `documents`.
        tokenizer: saved with the shards, in `out/tokenizer/`.
        out: the folder to make. It must be absent, empty, or hold the identical corpus.
        validation_fraction: share of the documents that validate, over 0 and under 1.
        shard_tokens: tokens a file, the last one of a split excepted.
        field: the key of the text in `.jsonl` files.
        progress: called with (bytes of text done, bytes of text in all), every few megabytes and at the end; not at
            all where the corpus is reused.

    Returns:
        The index of the folder.

    Raises:
        DataError: unreadable or missing text, too little of it, or `out` holds something else.
        InputError: a setting out of its range.
    """
    settings = _settings(validation_fraction, shard_tokens)
    out = Path(os.path.abspath(out))
    paths = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    present = occupied(out)
    found = survey(documents(paths, field=field), validation_fraction)
    fingerprint = _fingerprint(found, tokenizer, settings)
    if present:
        return _reused(out, fingerprint)
    with unpublished(out) as folder, contextlib.ExitStack() as files:
        writers = {name: _ShardWriter(folder / name, tokenizer, shard_tokens, files) for name in SPLITS}
        _encode(documents(paths, field=field), found, tokenizer, writers, progress)
        save(tokenizer, folder / TOKENIZER_FOLDER)
        index = Index(
            dtype=_dtype_name(tokenizer),
            vocabulary_size=tokenizer.vocabulary_size,
            end_of_text_id=tokenizer.end_of_text_id,
            fingerprint=fingerprint,
            tokenizer=tokenizer.fingerprint,
            settings=settings,
            sources=found.summary(),
            splits={name: writer.close() for name, writer in writers.items()},
        )
        index.write(folder)
        return index if publish(folder, out) else _reused(out, fingerprint)


class _ShardWriter:
    """Writes the tokens of one split, a new file every `shard_tokens`, and counts them as it goes."""

    def __init__(self, stem: Path, tokenizer: Tokenizer, shard_tokens: int, files: contextlib.ExitStack):
        self.stem, self.shard_tokens, self.files = stem, shard_tokens, files
        self.end_of_text_id = tokenizer.end_of_text_id
        self.dtype = DTYPES[_dtype_name(tokenizer)]
        self.counts = np.zeros(tokenizer.vocabulary_size, dtype=np.int64)
        self.documents = 0
        self.shards: list[Shard] = []
        self.stream = None
        self.tokens = 0  # in the open file

    def write(self, ids: np.ndarray) -> None:
        self.counts += np.bincount(ids, minlength=len(self.counts))
        while len(ids):
            if self.stream is None:
                file = self.stem.with_name(f"{self.stem.name}-{len(self.shards):05d}.bin")
                self.stream = self.files.enter_context(file.open("wb"))
                self.hash = hashlib.blake2b(digest_size=16)
                self.tokens = 0
            head, ids = np.split(ids, [self.shard_tokens - self.tokens])
            data = head.astype(self.dtype).tobytes()
            self.stream.write(data)
            self.hash.update(data)
            self.tokens += len(head)
            if self.tokens == self.shard_tokens:
                self._finish()

    def close(self) -> Split:
        if self.stream is not None:
            self._finish()
        total = int(self.counts.sum())
        share = self.counts[self.counts > 0] / max(total, 1)
        return Split(total, self.documents, max(0.0, math.fsum(-share * np.log(share))), tuple(self.shards))

    def _finish(self) -> None:
        self.stream.close()
        self.shards.append(Shard(Path(self.stream.name).name, self.tokens, self.hash.hexdigest()))
        self.stream = None


class _Piece(NamedTuple):
    """A piece of a document, whose split it goes to, and whether the document ends with it."""

    text: str
    writer: _ShardWriter
    last: bool


def _encode(
    texts: Iterable[Document],
    found: Survey,
    tokenizer: Tokenizer,
    writers: dict[str, _ShardWriter],
    progress: Progress | None,
) -> None:
    """Encodes all documents into the writers, in batches that use all cores."""
    batch: list[_Piece] = []
    characters = done_bytes = 0
    for piece in _cut(texts, found, writers, PIECE_CHARACTERS if cuts_are_exact(tokenizer.backend) else None):
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            done_bytes += _write(batch, tokenizer)
            batch, characters = [], 0
            if progress and done_bytes < found.text_bytes:
                progress(done_bytes, found.text_bytes)
    done_bytes += _write(batch, tokenizer)
    if progress:
        progress(done_bytes, found.text_bytes)


def _cut(
    texts: Iterable[Document], found: Survey, writers: dict[str, _ShardWriter], limit: int | None
) -> Iterator[_Piece]:
    """All pieces of all documents; at the end a DataError if they were not the documents of the survey."""
    content = hashlib.blake2b(digest_size=16)
    for document in texts:
        digest, _ = digest_of(document.text)
        content.update(digest)
        for part, writer in zip(found.sides.of(document.text, digest), writers.values()):
            before = None
            for text in pieces(part, limit or len(part)):
                if before is not None:
                    yield _Piece(before, writer, last=False)
                before = text
            if before is not None:
                yield _Piece(before, writer, last=True)
    if content.hexdigest() != found.content:
        raise DataError(
            f"the documents must not change while they are encoded, but some of those from {found.first} to "
            f"{found.last} did. Build again when they rest."
        )


def _write(batch: list[_Piece], tokenizer: Tokenizer) -> int:
    """Encodes and writes a batch; returns its bytes of text."""
    tokens: dict[_ShardWriter, list[int]] = {}
    for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch])):
        own = tokens.setdefault(piece.writer, [])
        own += ids
        if piece.last:
            own.append(piece.writer.end_of_text_id)
            piece.writer.documents += 1
    for writer, own in tokens.items():
        writer.write(np.array(own, dtype=np.int64))
    return sum(len(piece.text.encode()) for piece in batch)


def _settings(validation_fraction: float, shard_tokens: int) -> dict[str, float | int]:
    if not 0 < validation_fraction < 1:
        raise InputError(f"validation_fraction must lie between 0 and 1, got {validation_fraction}. Use 0.01 or so.")
    if shard_tokens < 1:
        raise InputError(f"shard_tokens must be at least 1, got {shard_tokens}. Use {1 << 26} or so.")
    return {"validation_fraction": validation_fraction, "shard_tokens": shard_tokens}


def _dtype_name(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.vocabulary_size < 65536 else "uint32"


def _fingerprint(found: Survey, tokenizer: Tokenizer, settings: dict[str, object]) -> str:
    parts = (found.content, tokenizer.fingerprint, sorted(settings.items()))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _reused(out: Path, fingerprint: str) -> Index:
    try:
        index = read_index(out)
        for name in SPLITS:
            check_sizes(out, index, name)
    except DataError as error:
        raise DataError(
            f"out must be absent, empty or hold the identical corpus, got {out}, which cannot be reused: {error} "
            "Or choose another folder."
        ) from error
    if index.fingerprint != fingerprint:
        raise DataError(
            f"out must be absent, empty or hold the identical corpus, got {out} with another one ({index.sources}, "
            f"{index.settings}): its documents, tokenizer or settings differ. Delete it or choose another folder."
        )
    return index
