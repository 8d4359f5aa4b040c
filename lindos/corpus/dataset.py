"""Rows of tokens for training, read from shards that stay on disk."""

from __future__ import annotations

import operator
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from lindos.core.errors import DataError, InputError, nearest
from lindos.corpus.index import DTYPES, SPLITS, TOKENIZER_FOLDER, check_hashes, check_sizes, read_index

IGNORED_LABEL = -100  # what torch's cross_entropy leaves out


class TokenRows(Dataset):
    """Packed rows of `sequence` tokens of one split, mapped from disk.

    The tokens of all documents form one line, cut into rows that do not overlap; a row may hold several documents
    (the end-of-text token stands between them) and may cross shards. The tokens left over at the end are dropped from
    training, where all rows must weigh alike, and kept in validation, where every token must count: that last row is
    padded with end-of-text tokens whose labels are -100 (a single token left over predicts nothing and is dropped).
    Labels equal inputs: the loss shifts them. The data set may be pickled to workers; each maps the files anew.

    Args:
        folder: as `build` made it.
        split: "train" or "validation".
        sequence: tokens a row.
        verify: also read every byte and compare its hash. Sizes are always compared.

    Raises:
        DataError: no readable index or one of another version; a shard is missing, truncated, or (verify) changed; the
            split is shorter than one row.
        InputError: an unknown split, or a sequence under 2.

    Shapes:
        rows[i]["input_ids"], rows[i]["labels"]: int64 [sequence]
    """

    def __init__(
        self, folder: str | os.PathLike[str], split: str = "train", sequence: int = 1024, *, verify: bool = False
    ):
        if split not in SPLITS:
            raise InputError(f"split must be one of {', '.join(SPLITS)}, got {split!r}: {nearest(split, SPLITS)}.")
        if sequence < 2:
            raise InputError(f"sequence must be at least 2 (a token and the next one), got {sequence}.")
        self.folder = Path(os.path.abspath(folder))
        self.split = split
        self.sequence = operator.index(sequence)
        self.index = read_index(self.folder)
        check_sizes(self.folder, self.index, split)
        if verify:
            check_hashes(self.folder, self.index, split)
        self._shards = self.index.splits[split].shards
        self._ends = np.cumsum([shard.tokens for shard in self._shards], dtype=np.int64)  # in the line of all tokens
        self._maps: list[np.ndarray | None] = [None] * len(self._shards)
        whole, left = divmod(self.tokens, self.sequence)
        self._rows = whole + (1 if split == "validation" and left > 1 else 0)
        if not self._rows:
            raise DataError(
                f"the {split} split must fill at least one row, got {self.tokens} tokens in {self.folder} for "
                f"sequence={sequence}. Use sequence={max(self.tokens, 2)} or less, or more text."
            )

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        row = operator.index(row)
        if not -self._rows <= row < self._rows:
            raise IndexError(f"row must be 0 to {self._rows - 1} of {self.split}, got {row}")
        start = row % self._rows * self.sequence
        length = min(self.sequence, self.tokens - start)
        input_ids = torch.full((self.sequence,), self.end_of_text_id, dtype=torch.int64)
        self._copy(start, input_ids[:length].numpy())
        labels = input_ids.clone()
        labels[length:] = IGNORED_LABEL
        return {"input_ids": input_ids, "labels": labels}

    @property
    def tokens(self) -> int:
        """Tokens of the split, those left over at the end included."""
        return self.index.splits[self.split].tokens

    @property
    def vocabulary_size(self) -> int:
        return self.index.vocabulary_size

    @property
    def end_of_text_id(self) -> int:
        return self.index.end_of_text_id

    @property
    def fingerprint(self) -> str:
        """Hash of documents, tokenizer and settings; a resumed run compares it to know that the rows are the same."""
        return self.index.fingerprint

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / TOKENIZER_FOLDER

    @property
    def unigram_entropy(self) -> float:
        """In nats: the loss on this split of a model that knows only how frequent each token is."""
        return self.index.splits[self.split].unigram_entropy_nats

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_maps": [None] * len(self._shards)}

    def _copy(self, start: int, out: np.ndarray) -> None:
        """Fills out with the tokens from `start` on, from as many shards as they lie in."""
        number = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < len(out):
            tokens = self._mapped(number)
            place = start + filled - (int(self._ends[number]) - len(tokens))
            part = tokens[place : place + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            number += 1

    def _mapped(self, number: int) -> np.ndarray:
        tokens = self._maps[number]
        if tokens is None:
            file = self.folder / self._shards[number].file
            tokens = self._maps[number] = np.memmap(file, DTYPES[self.index.dtype], mode="r").view(np.ndarray)
        return tokens
