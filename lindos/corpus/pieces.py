"""Cutting long texts at line ends, so that one large file is encoded on all cores and in bounded memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import tokenizers

# A line end between two printable ASCII characters: every known pre-tokenizer sees it alike, unlike blank lines,
# indents and exotic spaces.
_BORDER = re.compile(r"(?<=[!-~]\n)(?=[!-~])")


def pieces(text: str, characters: int) -> Iterator[str]:
    """Yields a text in pieces, each cut at the first suitable line end after `characters` characters.

    A suitable line end stands between two printable ASCII characters. The pieces joined are the text.
    """
    start = 0
    while len(text) - start > characters:
        border = _BORDER.search(text, start + characters)
        if border is None:
            break
        yield text[start : border.start()]
        start = border.start()
    if start < len(text):
        yield text[start:]


def cuts_are_exact(backend: tokenizers.Tokenizer) -> bool:
    """Whether encoding the `pieces` of a text gives the very ids of the whole text.

    True for byte-level BPE with the GPT-2 pattern (whatever `train` makes): there a line end between two visible
    characters is always a word of its own, so no token spans the cut. Other tokenizers may put a mark before each
    text or let punctuation take the line end with it, and encode documents whole.
    """
    state = json.loads(backend.to_str())
    split, model = state["pre_tokenizer"] or {}, state["model"]
    plain_tokens = not any(
        token["lstrip"] or token["rstrip"] or "\n" in token["content"] for token in state["added_tokens"]
    )
    return (
        state["normalizer"] is None
        and split.get("type") == "ByteLevel"
        and not split.get("add_prefix_space", True)
        and split.get("use_regex", True)
        and model["type"] == "BPE"
        and not model.get("dropout")
        and plain_tokens
    )
