"""Errors that lindos raises. Each says what must hold, what was given and what to do.

An error is a value before it is an event: a rank that finds one hands it to `World.agree`, which raises it on all
ranks, so no rank is left waiting in a collective that the others never enter.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LindosError(Exception):
    """Base of every error that lindos raises on purpose. `exit_code` is what the command line returns."""

    exit_code = 2


class InputError(LindosError):
    """The caller gave something that cannot work: an option, a batch, an optimizer, a world size."""


class LayoutError(InputError):
    """A tensor cannot be cut as the plan asks."""


class RulesError(InputError):
    """A rule matches nothing, or two rules match one parameter, or a parameter has no rule."""


class DataError(InputError):
    """Text, token shards, tokenizer or weights on disk are missing, truncated or contradict each other."""


class CheckpointError(InputError):
    """A checkpoint is incomplete, damaged, foreign, or cannot be written."""


class RefusedError(LindosError):
    """lindos cannot do this exactly, and says so by name instead of doing it nearly."""

    exit_code = 3


class NumbersError(LindosError):
    """A loss or gradient is not finite."""

    exit_code = 5


class RankError(LindosError):
    """A rank failed, died or did not arrive at a collective; the message names it."""

    exit_code = 5


def nearest(name: str, known: Iterable[str]) -> str:
    """Text that names the closest known word to a misspelt one, and the list of all.

    Example:
        >>> nearest("fp23", ["fp32", "bf16"])
        "did you mean 'fp32'? Known: bf16, fp32"
    """
    words = sorted(known)
    close = difflib.get_close_matches(name, words, n=1, cutoff=0.5)
    return (f"did you mean '{close[0]}'? " if close else "") + "Known: " + ", ".join(words)
