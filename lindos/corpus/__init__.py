"""Data for language models: documents, tokenizer, token shards, rows, and the order they are seen in.

From text to training rows in four calls::

    paths = standard_library()                        # or your own files, folders and .jsonl
    tokenizer = train(documents(paths), 4096)         # or load("a Hugging Face folder")
    build(paths, tokenizer, "corpus/")                # token shards, complete or absent
    rows = TokenRows("corpus/", "train", sequence=1024)

    batch = [rows[i] for i in rows_of_step(seed=0, step=7, batch=8, count=len(rows))]

Nothing is downloaded, everything is deterministic, and what is damaged is named: file, line or byte.
"""

from lindos.corpus.dataset import TokenRows
from lindos.corpus.index import Index, Shard, Split, read_index
from lindos.corpus.order import order, rows_of_step
from lindos.corpus.shards import build
from lindos.corpus.text import Document, documents, standard_library
from lindos.corpus.tokenizer import END_OF_TEXT, Tokenizer, check_vocabulary, load, save, train
from lindos.corpus.words import known_words_share, words_of

__all__ = [
    "END_OF_TEXT",
    "Document",
    "Index",
    "Shard",
    "Split",
    "TokenRows",
    "Tokenizer",
    "build",
    "check_vocabulary",
    "documents",
    "known_words_share",
    "load",
    "order",
    "read_index",
    "rows_of_step",
    "save",
    "standard_library",
    "train",
    "words_of",
]
