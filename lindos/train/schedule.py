"""The learning rate of a step: linear warm-up, then a cosine."""

from __future__ import annotations

import math
from typing import Any

from lindos.core.errors import InputError
from lindos.train.config import Optim


def factor(step: int, total: int, warmup: int, last: float) -> float:
    """Share of the peak rate that step `step` of `total` is done with, 0 for the first.

    Rises by even parts to 1 at step `warmup` - 1, then falls along half a cosine that would reach `last` at step
    `total`, and stays there.

    Example:
        >>> [round(factor(step, 6, 2, 0.1), 3) for step in range(7)]
        [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    if step < warmup:
        return (step + 1) / warmup
    if step >= total:
        return last
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


class WarmupCosine:
    """Sets the rate of an optimizer's groups; each group keeps its own peak.

    Only the number of steps done is state, so a run that is resumed with another budget follows the new curve.

    Args:
        optimizer: its `param_groups` are written to.
        total: steps of the run.
        warmup: steps from 0 to the peak.
        last: the final rate as a share of the peak.
    """

    def __init__(self, optimizer: Any, total: int, warmup: int, last: float) -> None:
        self.total, self.warmup, self.last = total, warmup, last
        self.groups = optimizer.param_groups
        self.peaks = [float(group["lr"]) for group in self.groups]
        self.steps = 0
        self._set()

    def step(self) -> None:
        """One step of the optimizer was done."""
        self.steps += 1
        self._set()

    def get_last_lr(self) -> list[float]:
        """The rate that the next step is done with, a group."""
        return [group["lr"] for group in self.groups]

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = int(state["steps"])
        self._set()

    def _set(self) -> None:
        share = factor(self.steps, self.total, self.warmup, self.last)
        for group, peak in zip(self.groups, self.peaks):
            group["lr"] = peak * share


def warmup_steps(optim: Optim, total: int) -> int:
    """Warm-up of a run of `total` steps, at least one step of it left for the cosine.

    Raises:
        InputError: the warm-up is longer than the run.
    """
    if optim.warmup_steps is None:
        return round(optim.warmup_share * total)
    if optim.warmup_steps > total:
        raise InputError(
            f"optim.warmup_steps must be at most the {total} steps of the run, got {optim.warmup_steps}. "
            "Use optim.warmup_share, or more train.tokens."
        )
    return optim.warmup_steps
