"""One step: forward, backward, reduce, clip, optimizer, scheduler, under any plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lindos.booster import batch as batches
from lindos.booster.calls import Calls, Joined
from lindos.booster.compose import Plan
from lindos.core.errors import InputError, NumbersError
from lindos.optim.norms import clip_factor, owned_squares


@dataclass
class Result:
    """What a step did; global, identical on every rank. Reading a value may wait for the device, never communicates.

    Attributes:
        count: valid positions of the step.
        lr: learning rate that the step was taken with (of the first group).
        skipped: whether the optimizer did not step.
        metrics: sum / count of each metric that the loss function returned.
    """

    _loss: torch.Tensor
    _norm: torch.Tensor
    count: float
    lr: float | None
    skipped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean loss over the valid positions of all ranks."""
        return float(self._loss)

    @property
    def grad_norm(self) -> float:
        """Norm of the whole gradient, before clipping."""
        return float(self._norm)


@dataclass
class Totals:
    """Sums of this rank over the micro-batches of a step."""

    loss: torch.Tensor
    count: torch.Tensor
    metrics: dict[str, list[torch.Tensor]]
    extra: torch.Tensor


class Stepping:
    """Runs the micro-batches of one step and brings their sums together."""

    def __init__(self, plan: Plan, calls: Calls, micro_batches: int) -> None:
        self.plan, self.calls, self.micro_batches = plan, calls, micro_batches

    def gradients(self, batch: Any) -> tuple[Joined, Totals]:
        """Reduced gradients of the global mean loss in the chunks, and this rank's sums."""
        world, data = self.plan.world, self.plan.data
        if data.pending or data.reduced:
            raise InputError(
                "step(batch) starts from no gradients; call optimizer.zero_grad() after your own backward."
            )
        joined = Joined.of(batch, self.calls.loss, self.plan, self.micro_batches)
        moved = batches.move(batch, world.device)
        micros = batches.cut(moved, joined.rows, self.micro_batches)
        factor = world.mesh.size(("dp", "sp"))
        totals = _zero_totals(world.device)
        row = joined.first_row
        try:
            for i, micro in enumerate(micros):
                with self.calls.dropping(micro, row):
                    sums, extra = self.calls.sums(micro)
                    scale = factor / joined.count if joined.count else float(factor)
                    scaled = sums.total * scale
                    if extra is not None:
                        scaled = scaled + extra / len(micros)
                        totals.extra += extra.detach().double() / len(micros)
                    data.open(last=i == len(micros) - 1)
                    if scaled.requires_grad:
                        scaled.backward()
                    data.close()
                _add(totals, sums)
                row += batches.rows_of(micro, 1)
        except BaseException:
            data.abandon()
            raise
        return joined, totals

    def settle(self, joined: Joined, totals: Totals) -> tuple[torch.Tensor, torch.Tensor, float, dict[str, float]]:
        """Global loss, gradient norm, count and metrics.

        Communicates: one all_reduce over the world of 4 numbers and 2 a metric.
        """
        world, data, ledger = self.plan.world, self.plan.data, self.plan.ledger
        first = all(world.mesh.coordinate(axis) == 0 for axis in ("tp", "pp"))  # others hold the same sums
        layouts = ((ledger.kept(name), gradient) for name, gradient in data.gradients())
        squares = owned_squares(layouts, world.mesh).to(world.device)
        names = sorted(totals.metrics)
        mine = [totals.loss, totals.count, totals.extra, *(t for name in names for t in totals.metrics[name])]
        vector = torch.stack([squares, *(t if first else torch.zeros_like(t) for t in mine)])
        vector = world.all_reduce(vector, world.all, f"step totals {' '.join(names)}".strip())
        count = joined.count or float(vector[2])  # a user's count may be a sum of weights
        if count == 0:
            data.forget()
            raise InputError("the loss function counted no valid position on any rank.")
        norm = vector[0].sqrt()
        if joined.count is None:
            data.rescale(1.0 / count)
            norm = norm / count
        shares = world.mesh.size(("dp", "sp"))
        loss = vector[1] / count + vector[3] / shares
        metrics = {name: float(vector[4 + 2 * i] / vector[5 + 2 * i]) for i, name in enumerate(names)}
        return loss, norm, count, metrics

    def clip(self, norm: torch.Tensor, max_norm: float | None) -> None:
        if max_norm is not None:
            factor = float(clip_factor(norm, max_norm))
            if factor < 1:
                self.plan.data.rescale(factor)

    def check_finite(self, loss: torch.Tensor, norm: torch.Tensor, batch: Any, step: int) -> None:
        """
        Raises:
            NumbersError: on all ranks, naming the step, the rank and the first module that made the number.
        """
        if math.isfinite(float(loss)) and math.isfinite(float(norm)):
            return
        self.plan.data.forget()
        where = first_bad_module(self.calls.model, lambda: self._forwards(batch))
        found = self.plan.world.exchange(where, "not finite")
        rank = next((rank for rank, place in enumerate(found) if place), None)
        place = (
            f"rank {rank}, module {found[rank]}" if rank is not None else "in backward: every module's output is finite"
        )
        raise NumbersError(
            f"step {step}: loss {float(loss)}, gradient norm {float(norm)}; first at {place}. The weights are "
            f"as they were "
            "before this step."
        )

    def _forwards(self, batch: Any) -> None:
        moved = batches.move(batch, self.plan.world.device)
        rows = batches.rows_of(batch, 1)
        with torch.no_grad():
            for micro in batches.cut(moved, rows, self.micro_batches):
                with self.calls.dropping(micro, 0):
                    self.calls.sums(micro)


def _zero_totals(device: torch.device) -> Totals:
    def zero() -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=device)

    return Totals(zero(), zero(), {}, zero())


def _add(totals: Totals, sums: Any) -> None:
    totals.loss += sums.total.detach().double()
    totals.count += float(sums.count)
    for name, (total, count) in sums.metrics.items():
        pair = totals.metrics.setdefault(name, [torch.zeros_like(totals.loss), torch.zeros_like(totals.loss)])
        pair[0] += float(total)
        pair[1] += float(count)


def first_bad_module(model: nn.Module, run: Any) -> str | None:
    """Name of the first module, in order of execution, whose output is not finite; None if all are."""
    found: list[str] = []

    def look(name: str, outputs: Any) -> None:
        tensors = outputs if isinstance(outputs, tuple | list) else [outputs]
        if not found and any(
            torch.is_tensor(t) and t.is_floating_point() and not bool(t.isfinite().all()) for t in tensors
        ):
            found.append(name)

    hooks = [
        m.register_forward_hook(lambda _m, _i, out, at=name: look(at, out)) for name, m in model.named_modules() if name
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None
