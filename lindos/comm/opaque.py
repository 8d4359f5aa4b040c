"""Collectives as one operation: whoever watches a block's operations sees a collective whole, never its copies."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

_active = threading.local()


class Watcher(Protocol):
    """Who records the operations of this thread."""

    def collective(self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Run a collective on x unseen, and note that its result came from it."""
        ...


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Inside, the collectives of this thread go through the watcher."""
    before = getattr(_active, "watcher", None)
    _active.watcher = watcher
    try:
        yield
    finally:
        _active.watcher = before


F = TypeVar("F", bound=Callable[..., torch.Tensor])


def opaque(method: F) -> F:
    """Mark a method `(world, x, ...) -> tensor` as a collective."""

    @functools.wraps(method)
    def call(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        watcher = getattr(_active, "watcher", None)
        if watcher is None:
            return method(self, x, *args, **kwargs)
        return watcher.collective(lambda given: method(self, given, *args, **kwargs), x)

    return call  # type: ignore[return-value]
