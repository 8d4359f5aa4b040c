"""Tokenizers: loaded from a Hugging Face folder, or trained on the spot; saved so that transformers reads them.

A `Tokenizer` is the pair that language-model data needs: the encoder, and which token ends a document.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from lindos.core.errors import DataError, InputError, nearest
from lindos.corpus.pieces import pieces

END_OF_TEXT = "<|endoftext|>"

# Files beside tokenizer.json that transformers reads; carried from load to save unchanged.
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")

# Tried in this order where a folder does not say which token ends a text.
USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back, and the token that ends a document.

    Encoding adds no special tokens of its own; a special token spelled out in the text is read as that token, as
    transformers does (chat markup stays markup).

    Args:
        backend: the `tokenizers.Tokenizer` that does the work.
        end_of_text: the token that `build` appends after each document.
        companions: file name to content of what lies beside tokenizer.json (chat template, configuration).
    """

    backend: tokenizers.Tokenizer
    end_of_text: str = END_OF_TEXT
    companions: Mapping[str, str] = field(default_factory=dict)

    @property
    def end_of_text_id(self) -> int:
        return self.backend.token_to_id(self.end_of_text)

    @cached_property
    def vocabulary_size(self) -> int:
        """The highest token id plus one: what the model's embedding must at least have (ids may have holes)."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that decides the ids: equal fingerprints encode every text equally."""
        content = f"{self.end_of_text_id}\n{self.backend.to_str()}"
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        return [found.ids for found in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=not keep_special)


def load(path: str | os.PathLike[str], *, end_of_text: str | None = None) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face folder.

    Reads tokenizer.json through the `tokenizers` library; truncation and padding that it may prescribe are switched
    off, since they would silently cut documents. The end of a text is `eos_token` of the folder's configuration.

    Args:
        path: the folder, or its tokenizer.json.
        end_of_text: the token that ends a document, where the folder's own choice is not wanted.

    Raises:
        DataError: no tokenizer.json, one that cannot be read, or no known token that ends a text.
    """
    folder = Path(path)
    folder = folder.parent if folder.name == "tokenizer.json" else folder
    file = folder / "tokenizer.json"
    if not file.is_file():
        present = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else None
        shown = f"a folder with {', '.join(present[:8]) or 'nothing'}" if present is not None else "no such folder"
        raise DataError(
            f"a tokenizer folder must hold tokenizer.json, got {folder}: {shown}. "
            "Save it with AutoTokenizer(...).save_pretrained(folder), or train one with lindos.corpus.train."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"tokenizer.json must be a tokenizer, got {file}: {error}. Copy it again.") from error
    backend.no_truncation()
    backend.no_padding()
    companions = {name: (folder / name).read_text("utf-8") for name in COMPANIONS if (folder / name).is_file()}
    end = end_of_text or _end_of_text(companions, backend, folder)
    if backend.token_to_id(end) is None:
        raise DataError(
            f"the end of text must be a token of the tokenizer, got {end!r}, unknown to {file}: "
            f"{nearest(end, _special(backend))}. Name one with end_of_text=."
        )
    return Tokenizer(backend, end, companions)


def train(
    documents: Iterable[tuple[str, str] | str], vocab_size: int, *, sample_bytes: int | None = 8_000_000
) -> Tokenizer:
    """Trains a byte-level BPE tokenizer.

    Every text can be encoded and comes back unchanged, since the 256 bytes are its alphabet. Token 0 is
    `<|endoftext|>`, 1 to 256 are the bytes, the rest are merges. The same documents give the same tokenizer, on any
    number of cores. Where there is more text than `sample_bytes`, every k-th piece of it is used, with the smallest
    power of two k that suffices, found in one pass without holding more than twice the sample.

    Args:
        documents: as `documents` yields them, or texts.
        vocab_size: number of tokens, at least 257.
        sample_bytes: how much text to learn from; None for all of it.

    Returns:
        The tokenizer; smaller than asked, with a warning, where the text has too few repeated pairs.

    Raises:
        InputError: vocab_size under 257.
        DataError: no text at all.
    """
    least = 257
    if vocab_size < least:
        raise InputError(
            f"vocab_size must be at least {least} (256 bytes and {END_OF_TEXT}), got {vocab_size}. Use {least} or more."
        )
    sample = _sampled(documents, sample_bytes)
    if not sample:
        raise DataError("training a tokenizer needs text, got none. Give documents that are not empty.")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(sample, trainer)
    tokenizer = Tokenizer(backend)
    if tokenizer.vocabulary_size < vocab_size:
        warnings.warn(
            f"the text has only enough repeated pairs for {tokenizer.vocabulary_size} of the {vocab_size} tokens "
            "asked; give more text or a smaller vocab_size",
            stacklevel=2,
        )
    return tokenizer


def save(tokenizer: Tokenizer, folder: str | os.PathLike[str]) -> None:
    """Writes a folder that `load` and `transformers.AutoTokenizer.from_pretrained` read.

    A loaded tokenizer keeps its own configuration and chat template; a trained one gets a configuration that names
    `<|endoftext|>` as beginning, end and padding.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    companions = dict(tokenizer.companions)
    if "tokenizer_config.json" not in companions:
        end = tokenizer.end_of_text
        special = {"bos_token": end, "eos_token": end, "pad_token": end}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        companions["tokenizer_config.json"] = json.dumps(settings | special, indent=2) + "\n"
        companions.setdefault("special_tokens_map.json", json.dumps(special, indent=2) + "\n")
    for name, content in companions.items():
        (folder / name).write_text(content, "utf-8")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises DataError where the tokenizer has ids that a model of `vocab_size` tokens has no embedding for."""
    if tokenizer.vocabulary_size > vocab_size:
        raise DataError(
            f"the model's vocabulary must cover the tokenizer's, got a model of {vocab_size} tokens and a tokenizer of "
            f"{tokenizer.vocabulary_size} (highest id {tokenizer.vocabulary_size - 1}). Use the model's own tokenizer, "
            f"or a model with vocab_size={tokenizer.vocabulary_size} or more."
        )


def _sampled(documents: Iterable[tuple[str, str] | str], limit_bytes: int | None) -> list[str]:
    """Every k-th piece of the documents, k the smallest power of two that keeps within the limit.

    Documents are broken into pieces first, so that one large file is sampled from all over.
    """
    kept: list[str] = []
    sizes: list[int] = []
    every, number, total_bytes = 1, 0, 0
    piece_length = 1 << 16 if limit_bytes is None else max(1, min(1 << 16, limit_bytes // 16))
    for item in documents:
        for piece in pieces(item if isinstance(item, str) else item[1], piece_length):
            for start in range(0, len(piece), 4 * piece_length):  # more than once only for endless lines
                if number % every == 0:
                    kept.append(piece[start : start + 4 * piece_length])
                    sizes.append(len(kept[-1].encode()))
                    total_bytes += sizes[-1]
                while limit_bytes is not None and total_bytes > limit_bytes and len(kept) > 1:
                    kept, sizes, every = kept[::2], sizes[::2], every * 2
                    total_bytes = sum(sizes)
                number += 1
    return kept


def _end_of_text(companions: Mapping[str, str], backend: tokenizers.Tokenizer, folder: Path) -> str:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            token = json.loads(companions.get(name, "{}")).get("eos_token")
        except (json.JSONDecodeError, AttributeError) as error:
            raise DataError(f"{folder / name} must be a JSON object, got {error}. Copy it again.") from error
        if token:
            return token["content"] if isinstance(token, dict) else token
    for token in USUAL_ENDS:
        if backend.token_to_id(token) is not None:
            return token
    raise DataError(
        f"a tokenizer must say which token ends a text, got none in {folder} (no eos_token in tokenizer_config.json, "
        f"none of {', '.join(USUAL_ENDS)}). Name it with end_of_text=, known: {', '.join(_special(backend)) or 'none'}."
    )


def _special(backend: tokenizers.Tokenizer) -> list[str]:
    return [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
