"""Which words a text shares with a corpus: a check of generated text that needs no second model.

A model that has learnt anything writes words that its corpus has; one that has not writes letters at random.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_WORD = re.compile(r"[A-Za-z_]*[A-Za-z][A-Za-z_]*")


def words_of(documents: Iterable[tuple[str, str] | str]) -> frozenset[str]:
    """The set of words of documents, built in one pass.

    A word is a run of ASCII letters and underscores with at least one letter, as written (case counts), so identifiers
    of code are words too.

    Args:
        documents: as `documents` yields them, or texts.
    """
    words: set[str] = set()
    for item in documents:
        words.update(_WORD.findall(item if isinstance(item, str) else item[1]))
    return frozenset(words)


def known_words_share(sample_text: str, corpus: Iterable[tuple[str, str] | str] | frozenset[str] | set[str]) -> float:
    """The share, 0 to 1, of the words of a sample that occur in the corpus.

    Repeated words count as often as they stand in the sample. A sample without any word knows none: 0.0.

    Args:
        sample_text: generated text.
        corpus: a set of words from `words_of` (build it once for many samples), or documents, or texts.

    Example:
        >>> known_words_share("return flurb", ["def f(): return 1"])
        0.5
    """
    if isinstance(corpus, str):
        corpus = [corpus]
    known = corpus if isinstance(corpus, frozenset | set) else words_of(corpus)
    words = _WORD.findall(sample_text)
    return sum(word in known for word in words) / len(words) if words else 0.0
