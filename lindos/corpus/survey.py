"""The first reading of a corpus: finds every fault before a token is written, and decides who goes to validation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

from lindos.core.errors import DataError
from lindos.corpus.text import Document


@dataclass(frozen=True)
class Sides:
    """Which part of a document trains and which validates: a pure function of its text.

    Usually by hash: a document whose hash falls under `fraction` validates, so it is on the same side in every
    corpus, and so are its copies. In a corpus too small for that, `whole` names the one text that validates, or `cut`
    the one whose last part does.
    """

    fraction: float
    whole: bytes | None = None
    cut: bytes | None = None

    def of(self, text: str, digest: bytes) -> tuple[str, str]:
        """(training part, validation part) of a document; one is empty unless it is the cut one."""
        if digest == self.cut:
            place = _cut_place(text, self.fraction)
            return text[:place], text[place:]
        if self.whole is None and self.cut is None:
            validates = under(digest, self.fraction)
        else:
            validates = digest == self.whole
        return ("", text) if validates else (text, "")


@dataclass(frozen=True)
class Survey:
    """What one reading of all documents found.

    `content` is a hash of their texts in order; sources do not enter, so a corpus that moved is the same corpus.
    """

    content: str
    documents: int
    text_bytes: int
    first: str
    last: str
    sides: Sides

    def summary(self) -> dict[str, int | str]:
        return {
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "first": self.first,
            "last": self.last,
        }


def digest_of(text: str) -> tuple[bytes, int]:
    """The hash of a text, and its length in bytes."""
    data = text.encode()
    return hashlib.blake2b(data, digest_size=16).digest(), len(data)


def under(digest: bytes, fraction: float) -> bool:
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def survey(documents: Iterable[Document], fraction: float) -> Survey:
    """Reads all documents once and chooses the sides.

    Raises:
        DataError: the documents cannot give tokens to both sides: one text of one character.
    """
    content = hashlib.blake2b(digest_size=16)
    count = text_bytes = 0
    first = last = ""
    sizes: dict[bytes, int] | None = {}  # bytes by text, while one side is still empty
    seen = {True: False, False: False}
    longest = 0
    for last, text in documents:
        digest, size_bytes = digest_of(text)
        content.update(digest)
        first = first or last
        count, text_bytes, longest = count + 1, text_bytes + size_bytes, max(longest, len(text))
        seen[under(digest, fraction)] = True
        if sizes is not None:
            sizes[digest] = sizes.get(digest, 0) + size_bytes
            sizes = None if all(seen.values()) else sizes
    sides = Sides(fraction) if sizes is None else _small_sides(sizes, fraction)
    if sides.cut is not None and longest < 2:
        raise DataError(
            f"a corpus must have text for training and for validation, got {count} document(s) of one character. "
            "Give more text."
        )
    return Survey(content.hexdigest(), count, text_bytes, first, last, sides)


def _small_sides(sizes: dict[bytes, int], fraction: float) -> Sides:
    """Sides for a corpus that hashing leaves without training or without validation text.

    The document nearest in size to the wanted fraction validates; where that is a tenth of it or less, or most of
    the corpus, the last part of the largest document does instead.
    """
    total_bytes = sum(sizes.values())
    wanted_bytes = fraction * total_bytes
    nearest = min(sizes, key=lambda digest: (abs(math.log(sizes[digest] / wanted_bytes)), digest))
    if len(sizes) > 1 and wanted_bytes / 10 < sizes[nearest] <= max(fraction, 0.5) * total_bytes:
        return Sides(fraction, whole=nearest)
    return Sides(fraction, cut=max(sizes, key=lambda digest: (sizes[digest], digest)))


def _cut_place(text: str, fraction: float) -> int:
    """Where the validating part begins: at a line near the fraction if there is one, and never at either end."""
    wanted = min(max(round(len(text) * (1 - fraction)), 1), len(text) - 1)
    slack = round(len(text) * min(fraction, 1 - fraction) / 2)
    line_end = text.rfind("\n", max(wanted - slack, 0), wanted)
    return line_end + 1 if line_end >= 0 else wanted
