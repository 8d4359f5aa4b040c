"""Signals: SIGTERM and SIGINT ask a run to save and stop, after the same step on every rank."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

EXIT_STOPPED = 75
_KEY = "train/stop_after"


class StopRequests:
    """Whether this process was asked to stop, and after which step all ranks do.

    Ranks get a signal at different moments. The first that sees it after its step s writes s + 1 to the store before it
    enters step s + 1; no other rank can complete that step without it, so all read the same number in time. A second
    signal ends the process as usual.
    """

    def __init__(self, world: Any) -> None:
        self.world = world
        self.asked = False

    @contextlib.contextmanager
    def heard(self) -> Iterator[StopRequests]:
        """Listens inside the block; in another thread than the main one nothing can listen."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    def now(self) -> bool:
        """Outside steps: whether any rank was asked. An exchange."""
        return any(self.world.exchange(self.asked, "stop requests")) if self.world.size > 1 else self.asked

    def after(self, step: int) -> bool:
        """Whether the run stops after this step; called after each, and the same on every rank."""
        if self.world.size == 1:
            return self.asked
        store = self.world.link.store
        if store.check([_KEY]):
            return step >= int(store.get(_KEY))
        if self.asked:
            store.set(_KEY, str(step + 1))
        return False

    def _hear(self, number: int, frame: Any) -> None:
        self.asked = True
        signal.signal(number, signal.SIG_DFL)
