"""Flags of the small commands: argparse whose mistakes are errors of lindos that name the nearest flag."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from lindos.core.errors import InputError, nearest
from lindos.train.reading import taken as taken


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises InputError instead of leaving the process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}. See {self.prog} --help.")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse, and name the nearest flag where one is unknown."""
        unknown = next((word for word in arguments if word.startswith("--") and not self._knows(word)), None)
        if unknown is not None:
            known = [name for name in self._option_string_actions if name.startswith("--")]
            raise InputError(f"{self.prog} has no flag {unknown}: {nearest(unknown.partition('=')[0], known)}.")
        return self.parse_args(list(arguments))

    def _knows(self, word: str) -> bool:
        return word == "--" or word.partition("=")[0] in self._option_string_actions


def count(text: str | None, flag: str) -> int | None:
    """A number of at least 1.

    Raises:
        InputError: anything else.
    """
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"{flag} must be a whole number of at least 1, got {text!r}.")
    return int(text)
