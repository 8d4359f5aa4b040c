"""Verdicts: when a collective does not complete, every rank says who did not arrive and what each did last.

Each rank keeps a short trail of its collectives. The first rank that meets a limit, a mismatch or a dead neighbour
raises the flag in the store; a watching thread on every rank answers it with that rank's state, also when its main
thread sleeps or computes, and whoever waits in a collective stops waiting. A rank that gives no answer is dead.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn

from lindos.core.errors import RankError

FLAG, ANSWER_SECONDS, POLL_SECONDS = "verdict/flag", 3.0, 0.25


@dataclass(frozen=True)
class Step:
    """One collective as the trail keeps it."""

    number: int
    op: str
    axes: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    dtype: Any
    detail: str | int = ""

    def text(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        op = f"{self.op}({self.detail})" if self.detail != "" else self.op
        return f"{op} #{self.number} {self.name!r} over {','.join(self.axes)} {list(self.shape)} {dtype}"


class Watch:
    """The trail of one rank and the thread that answers for it."""

    def __init__(self, store: Any, rank: int, size: int, limit_seconds: float, title: str = "") -> None:
        self.store, self.rank, self.size, self.limit_seconds = store, rank, size, limit_seconds
        self.title = title or f"rank {rank}"
        self.trail: deque[Step] = deque(maxlen=256)
        self.inside: Step | None = None
        self.since = time.monotonic()
        self.error = ""
        self.flagged = threading.Event()
        self._stop = threading.Event()
        self._main = threading.get_ident()
        self._answer = threading.Lock()
        self._answered = False
        self._thread = threading.Thread(target=self._watch, name="lindos-watch", daemon=True)
        if size > 1:
            self._thread.start()

    def enter(self, step: Step) -> None:
        """A collective begins; raises instead when another rank has flagged a failure."""
        self.trail.append(step)
        self.inside, self.since = step, time.monotonic()
        if self.flagged.is_set():
            self.fail(f"{step.text()} is not begun")

    def note(self, step: Step) -> None:
        """A collective is begun that is waited for later."""
        self.trail.append(step)
        if self.flagged.is_set():
            self.fail(f"{step.text()} is not begun")

    def resume(self, step: Step) -> None:
        """Wait for a collective that was noted."""
        self.inside, self.since = step, time.monotonic()

    def leave(self) -> None:
        self.inside, self.since = None, time.monotonic()

    def check(self, started: float) -> None:
        """Called now and then while waiting: raises on a flag or past the limit."""
        waited = time.monotonic() - started
        if self.flagged.is_set():
            self.fail(f"{self._doing()} is given up")
        if waited > self.limit_seconds:
            self.fail(f"{self._doing()} did not complete in {self.limit_seconds:g} s")

    def report(self, error: BaseException) -> None:
        """This rank failed by itself: tell the others why, so that none waits for it."""
        if self.size > 1 and not isinstance(error, RankError) and not self._stop.is_set():
            self.error = "".join(traceback.format_exception_only(error)).strip()
            self._publish()
            self._raise_flag()

    def fail(self, what: str, missing: str = "") -> NoReturn:
        """Raise on this rank, with the states of all."""
        self._raise_flag()
        self._publish()
        states = self._states()
        self.inside = None
        raise RankError(f"[{self.title}] {what}.{missing and ' ' + missing}\n" + self._table(states))

    def close(self) -> None:
        """End the thread: left inside the store's C++ it would abort the process at its exit."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=2)

    def _table(self, states: dict[int, dict[str, Any]]) -> str:
        here = states.get(self.rank, {}).get("inside")
        lines = []
        for rank in range(self.size):
            state = states.get(rank)
            if state is None:
                lines.append(f"  rank {rank}: did not arrive; gives no answer: dead, stopped or cut off")
            elif state["error"]:
                lines.append(f"  rank {rank}: did not arrive; raised {state['error']}; last {state['last']}")
            elif state["inside"] is None:
                where = f"; at {state['stack']}" if state["stack"] else ""
                lines.append(f"  rank {rank}: did not arrive; outside collectives; last {state['last']}{where}")
            else:
                other = "" if state["inside"] == here else "a different call: "
                lines.append(f"  rank {rank}: {other}waits {state['seconds']:.1f} s in {state['inside']}")
        return "\n".join(lines)

    def _doing(self) -> str:
        return self.inside.text() if self.inside else "a collective"

    def _raise_flag(self) -> None:
        self.flagged.set()
        try:
            self.store.set(FLAG, str(self.rank))
        except Exception:  # the store is gone with the rank that kept it; the table then says so
            return

    def _publish(self) -> None:
        with self._answer:
            if self._answered:
                return
            self._answered = True
        last = (
            self.trail[-1 if self.inside is None else -2].text() if len(self.trail) > (self.inside is not None) else ""
        )
        state = {
            "inside": self.inside.text() if self.inside else None,
            "seconds": time.monotonic() - self.since,
            "last": last or "nothing",
            "error": self.error,
            "stack": self._stack(),
        }
        try:
            self.store.set(f"verdict/{self.rank}", json.dumps(state))
        except Exception:  # as above
            return

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main)
        frames = traceback.extract_stack(frame)[-3:] if frame is not None else []
        return " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in reversed(frames))

    def _states(self) -> dict[int, dict[str, Any]]:
        states: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + ANSWER_SECONDS
        while len(states) < self.size and time.monotonic() < until:
            for rank in range(self.size):
                key = f"verdict/{rank}"
                try:
                    if rank not in states and self.store.check([key]):
                        states[rank] = json.loads(self.store.get(key))
                except Exception:  # the store is gone: what is known is all there is
                    return states
            time.sleep(0.02)
        return states

    def _watch(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                raised = self.store.check([FLAG])
            except Exception:  # the store is gone: whoever kept it has died
                raised = not self._stop.is_set()
            if raised:
                self._publish()
                self.flagged.set()
                return
