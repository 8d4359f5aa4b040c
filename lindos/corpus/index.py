"""index.json: what a folder of token shards holds. Written last, read first.

```
folder/
  train-00000.bin  train-00001.bin ...     token ids, little-endian, nothing else
  validation-00000.bin ...
  tokenizer/                               the tokenizer that wrote them, a Hugging Face folder
  index.json                               this file: sizes, hashes, where the tokens came from
```
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lindos.core.errors import DataError

VERSION = 1
INDEX_FILE = "index.json"
TOKENIZER_FOLDER = "tokenizer"
SPLITS = ("train", "validation")

# Little-endian on disk, whatever machine wrote them.
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

_READ_BYTES = 1 << 24


@dataclass(frozen=True)
class Shard:
    """One file of tokens: its name, how many it holds, and the blake2b hash of its bytes."""

    file: str
    tokens: int
    blake2b: str


@dataclass(frozen=True)
class Split:
    """The shards of one split, in order.

    `unigram_entropy_nats` is the loss of a model that knows only how frequent each token of this split is: what
    training must get under before it has learnt anything about order.
    """

    tokens: int
    documents: int
    unigram_entropy_nats: float
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Index:
    """The content of index.json.

    Args:
        dtype: of the tokens on disk, "uint16" or "uint32".
        vocabulary_size: of the tokenizer: the highest id plus one.
        end_of_text_id: the token after each document.
        fingerprint: hash of inputs, tokenizer and settings: equal ones give equal shards.
        tokenizer: fingerprint of the tokenizer.
        settings: what `build` was told.
        sources: number of documents, bytes of text, first and last source.
        splits: by name, "train" and "validation".
    """

    dtype: str
    vocabulary_size: int
    end_of_text_id: int
    fingerprint: str
    tokenizer: str
    settings: dict[str, Any]
    sources: dict[str, Any]
    splits: dict[str, Split]
    version: int = VERSION

    def write(self, folder: Path) -> None:
        (folder / INDEX_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", "utf-8")


def read_index(folder: Path) -> Index:
    """The index of a folder.

    Raises:
        DataError: no index, one that cannot be read, or one of another version.
    """
    file = folder / INDEX_FILE
    try:
        content = json.loads(file.read_text("utf-8"))
        version = content["version"]
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = "it has none" if folder.is_dir() else "no such folder"
        raise DataError(
            f"a corpus folder must hold {INDEX_FILE}, got {folder}: {reason}. Write it with lindos.corpus.build."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(file, error) from error
    if version != VERSION:
        raise DataError(
            f"this lindos reads token shards of version {VERSION}, got version {version!r} in {file}. "
            "Build the corpus again, or use the lindos that wrote it."
        )
    try:
        splits = {name: _split(content["splits"][name]) for name in SPLITS}
        index = Index(**{**content, "splits": splits})
        DTYPES[index.dtype]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(file, error) from error
    for name, split in splits.items():
        if sum(shard.tokens for shard in split.shards) != split.tokens:
            raise _unreadable(file, f"the shards of {name} do not add up to its {split.tokens} tokens")
    return index


def check_sizes(folder: Path, index: Index, split: str) -> None:
    """Raises DataError, naming the file, where a shard is missing or not as long as the index says."""
    for shard in index.splits[split].shards:
        file = folder / shard.file
        expected_bytes = shard.tokens * DTYPES[index.dtype].itemsize
        if not file.is_file():
            raise DataError(f"every shard of the index must exist, {file} is missing. Copy or build the corpus again.")
        found_bytes = file.stat().st_size
        if found_bytes != expected_bytes:
            raise DataError(
                f"{file} must hold {expected_bytes} bytes ({shard.tokens} tokens of {index.dtype}), found "
                f"{found_bytes} bytes: {'truncated' if found_bytes < expected_bytes else 'too long'}. "
                "Copy or build the corpus again."
            )


def check_hashes(folder: Path, index: Index, split: str) -> None:
    """Raises DataError, naming the file, where the bytes of a shard are not those that were written."""
    for shard in index.splits[split].shards:
        file = folder / shard.file
        found = hashlib.blake2b(digest_size=16)
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                found.update(block)
        if found.hexdigest() != shard.blake2b:
            raise DataError(
                f"{file} must have the hash {shard.blake2b}, found {found.hexdigest()}: its bytes have changed since "
                "it was written. Copy or build the corpus again."
            )


def _split(content: dict[str, Any]) -> Split:
    return Split(**{**content, "shards": tuple(Shard(**shard) for shard in content["shards"])})


def _unreadable(file: Path, reason: object) -> DataError:
    return DataError(f"the index of a corpus must be readable, got {file}: {reason}. Copy or build the corpus again.")
