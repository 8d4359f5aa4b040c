"""`lindos data`: turn text into token shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lindos.cli.arguments import Parser


def main(arguments: Sequence[str]) -> int:
    """Builds a corpus folder that `lindos pretrain --data FOLDER` reads."""
    parser = Parser(prog="lindos data", description="Turn text into token shards.")
    parser.add_argument("path", nargs="+", help="files, folders, .jsonl files, or stdlib")
    parser.add_argument("--tokenizer", default="4096", help="folder with tokenizer.json, or tokens of a new BPE (4096)")
    parser.add_argument("--out", required=True, help="folder to make")
    parser.add_argument("--validation_fraction", "--validation-fraction", type=float, default=0.01, help="share (0.01)")
    parser.add_argument("--text_field", "--text-field", default="text", help="key of the text in .jsonl files (text)")
    given = parser.read(arguments)

    from lindos import corpus
    from lindos.train.config import Data
    from lindos.train.data import STDLIB, tokenizer_of

    data = Data(tuple(given.path), given.tokenizer, text_field=given.text_field)
    paths: list = [path for path in data.path if path != STDLIB]
    paths += corpus.standard_library() if STDLIB in data.path else []
    tokenizer = tokenizer_of(data, paths, Path(given.out), print)
    index = corpus.build(
        paths, tokenizer, given.out, validation_fraction=given.validation_fraction, field=given.text_field
    )
    for name, split in index.splits.items():
        print(
            f"{name}: {split.documents:,} documents, {split.tokens:,} tokens, unigram entropy "
            f"{split.unigram_entropy_nats:.4f} nats"
        )
    return 0
