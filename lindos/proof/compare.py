"""Comparison of two traces: the first number that differs, in the order in which a step makes them.

fp64: |difference| of a tensor at most 1e-9 x max(its norm, 1e-6 x the whole gradient's norm); loss 1e-12 relative.
fp32: at most 8 x one process's own distance from fp64, by tensor, where that distance is not smaller than what rounding
of the whole gradient spreads over all of them, and is the largest of two runs that sum in opposite orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lindos.proof.reference import Trace

FP64_TENSOR, FP64_FLOOR, FP64_LOSS, FP32_FACTOR = 1e-9, 1e-6, 1e-12, 8.0


@dataclass(frozen=True)
class Difference:
    """One number or tensor that is not equal.

    Attributes:
        step: of the run, from 0.
        what: count, loss, gradient, norm, rate or weight.
        name: of the tensor, else empty.
        by: relative difference.
        allowed: what was allowed.
    """

    step: int
    what: str
    name: str
    by: float
    allowed: float

    def text(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"step {self.step}: {self.what}{name} differs by {self.by:.2e} (allowed {self.allowed:.1e})"


def exact(mine: Trace, theirs: Trace) -> list[Difference]:
    """Differences of two fp64 runs, in the order of their making."""
    found: list[Difference] = []
    for step in range(len(theirs.losses)):
        found += _scalars(mine, theirs, step, FP64_LOSS)
        whole = _norm(theirs.gradients[step])
        limits = {n: FP64_TENSOR * max(_len(g), FP64_FLOOR * whole) for n, g in theirs.gradients[step].items()}
        found += _tensors("gradient", step, mine.gradients[step], theirs.gradients[step], limits)
        found += _relative("norm", step, mine.grad_norms[step], theirs.grad_norms[step], FP64_TENSOR)
        found += _relative("rate", step, mine.lrs[step], theirs.lrs[step], FP64_LOSS)
        limits = {n: FP64_TENSOR * max(_len(w), FP64_FLOOR) for n, w in theirs.weights[step].items()}
        found += _tensors("weight", step, mine.weights[step], theirs.weights[step], limits)
    return found


def rounded(mine: Trace, own: Sequence[Trace], true: Trace) -> list[Difference]:
    """Differences of an fp32 run from fp64 that are larger than 8 x those of one process in fp32.

    Args:
        own: one process in fp32, summing in several orders: its distance is the largest of theirs.
    """
    found: list[Difference] = []
    for step in range(len(true.losses)):
        own_loss = max(abs(o.losses[step] - true.losses[step]) for o in own) / abs(true.losses[step])
        allowed = FP32_FACTOR * max(own_loss, torch.finfo(torch.float32).eps)
        found += _relative("loss", step, mine.losses[step], true.losses[step], allowed)
        for what, a, c in (("gradient", mine.gradients, true.gradients), ("weight", mine.weights, true.weights)):
            limits = dict.fromkeys(c[step], 0.0)
            for trace in own:
                theirs = trace.gradients[step] if what == "gradient" else trace.weights[step]
                apart = {n: _minus(theirs[n], t) for n, t in c[step].items()}
                spread = _norm(apart) / max(_norm(c[step]), 1e-30)
                for n, t in c[step].items():
                    floor = max(spread * _len(t), spread * FP64_FLOOR * _norm(c[step]))
                    limits[n] = max(limits[n], FP32_FACTOR * max(_len(apart[n]), floor))
            found += _tensors(what, step, a[step], c[step], limits)
    return found


def _scalars(mine: Trace, theirs: Trace, step: int, allowed: float) -> list[Difference]:
    counts = _relative("count", step, mine.counts[step], theirs.counts[step], 0.0)
    return counts + _relative("loss", step, mine.losses[step], theirs.losses[step], allowed)


def _relative(what: str, step: int, a: float, b: float, allowed: float) -> list[Difference]:
    by = abs(a - b) / max(abs(b), 1e-30)
    return [] if by <= allowed else [Difference(step, what, "", by, allowed)]


def _tensors(
    what: str, step: int, mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], limits: dict[str, float]
) -> list[Difference]:
    found = []
    for name, true in theirs.items():
        distance, size = _len(_minus(mine[name], true)), max(_len(true), 1e-30)
        if not distance <= limits[name]:
            found.append(Difference(step, what, name, distance / size, limits[name] / size))
    return found


def _minus(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() - b.double()


def _len(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double()))


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([torch.linalg.vector_norm(t.double()) for t in tensors.values()]).norm())
