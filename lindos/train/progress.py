"""What a person sees while a run steps: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


class Lines:
    """A plain line every so many steps, with the rate of tokens since the line before."""

    def __init__(self, say: Callable[[str], None], total: int, every: int) -> None:
        self.say, self.total, self.every = say, total, every
        self._seconds, self._steps = 0.0, 0

    def step(self, values: dict[str, Any]) -> None:
        self._seconds += values["seconds"]
        self._steps += 1
        if values["step"] % self.every == 0 or values["step"] in (1, self.total):
            self.say(self.text(values))
            self._seconds, self._steps = 0.0, 0

    def note(self, text: str) -> None:
        self.say(text)

    def text(self, values: dict[str, Any]) -> str:
        mean = self._seconds / self._steps
        scale = values["seconds"] / mean if mean else 1.0
        return (
            f"step {values['step']}/{self.total}  loss {values['loss']:.4f}  norm {values['grad_norm']:.3f}  "
            f"lr {values['lr']:.2e}  {values['tokens_per_second'] * scale:,.0f} tokens/s  "
            f"mfu {100 * values['mfu'] * scale:.1f} %" + ("  skipped" if values["skipped"] else "")
        )


class Live(Lines):
    """The same, with a bar below that moves at every step."""

    def __init__(self, say: Callable[[str], None], total: int, every: int, bar: Any) -> None:
        super().__init__(bar.console.print, total, every)
        self.bar = bar
        self.task = bar.add_task("training", total=total, shown="")

    def step(self, values: dict[str, Any]) -> None:
        super().step(values)
        self.bar.update(self.task, completed=values["step"], shown=f"loss {values['loss']:.4f}")


@contextlib.contextmanager
def shown(say: Callable[[str], None], first: bool, total: int, every: int) -> Iterator[Lines]:
    """The line of this process: live on the terminal of the first rank."""
    if not (first and sys.stdout.isatty()):
        yield Lines(say, total, every)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[shown]}"), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        yield Live(say, total, every, bar)
