"""Planted faults: the ways in which such libraries go wrong, done on purpose. `prove` must name each.

A proof that cannot fail proves nothing; the test suite plants every fault and reads the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from lindos.booster.booster import Booster
from lindos.core.errors import InputError, nearest
from lindos.memory.chunk import Chunk, Phase
from lindos.parallel.tensor.heads import home_of

Patches = list[Any]


@dataclass(frozen=True)
class Fault:
    """A name, what a report says of it, and how it is planted: patches on one booster."""

    name: str
    says: str
    make: Callable[[Booster], Patches]


def _data(booster: Booster) -> Any:
    assert booster._plan is not None
    return booster._plan.data


def _reductions(booster: Booster, change: Callable[[Any, torch.Tensor, Any, str], None]) -> Patches:
    """Change the reduction of the second chunk."""
    world = _data(booster).world
    own = world.begin_all_reduce

    def begin(x: torch.Tensor, axes: Any, name: str) -> Any:
        if name != "chunk 1":
            return own(x, axes, name)
        change(world, x, axes, name)
        return None

    return [patch.object(world, "begin_all_reduce", begin)]


def _skip(booster: Booster) -> Patches:
    return _reductions(booster, lambda world, x, axes, name: None)


def _double(booster: Booster) -> Patches:
    def twice(world: Any, x: torch.Tensor, axes: Any, name: str) -> None:
        world.all_reduce(x, axes, name)
        world.all_reduce(x, axes, f"{name} again")

    return _reductions(booster, twice)


def _sum_for_mean(booster: Booster) -> Patches:
    return [patch.object(_data(booster), "scale", 1.0)]


def _shift_after_cut(booster: Booster) -> Patches:
    return [patch("lindos.booster.loss.shift", shifted_in_halves)]


def shifted_in_halves(labels: torch.Tensor) -> torch.Tensor:
    """What a sequence cut in two before the shift makes of labels: the border's label is lost."""
    halves = [torch.nn.functional.pad(half[..., 1:], (0, 1), value=-100) for half in labels.chunk(2, -1)]
    return torch.cat(halves, -1)


def _count_position_0(booster: Booster) -> Patches:
    return [patch.object(booster._calls.loss, "counted", lambda batch: int((batch["labels"] != -100).sum()))]


def _wrong_kv_group(booster: Booster) -> Patches:
    """Each rank computes with the kv heads of the next group: rolled in the masters before the first step."""
    plan = booster._plan
    assert plan is not None
    assert plan.tensor is not None
    for name, rule in plan.tensor.resolved.items():
        heads = plan.tensor.heads.get(home_of(name, rule))
        if heads and rule.heads == "key_value":
            for entry in plan.ledger.of("parameter"):
                if entry.name.rpartition(".")[0] == name:
                    whole = booster.full(entry.name)
                    rolled = whole.roll(-(whole.shape[0] // heads.key_value), 0)
                    local = plan.data.value(entry.name)
                    for box in plan.ledger.kept(entry.name).boxes(plan.world.mesh):
                        part = rolled[tuple(slice(a, b) for a, b in box.full)]
                        local[tuple(slice(a, b) for a, b in box.local)] = part
    return []


def _mask_dropped(booster: Booster) -> Patches:
    calls = booster._calls
    own = calls._own
    return [patch.object(calls, "_own", lambda *args, **kwargs: own(*args, **{**kwargs, "attention_mask": None}))]


def _puts(booster: Booster, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Patches:
    own = Chunk.put

    def put(self: Chunk, slot: Any, gradient: torch.Tensor, scale: float) -> None:
        own(self, slot, change(slot, gradient), scale)

    return [patch.object(Chunk, "put", put)]


def _tied_twice(booster: Booster) -> Patches:
    assert booster._plan is not None
    tied = {entry.name for entry in booster._plan.ledger.of("parameter") if entry.tied}
    return _puts(booster, lambda slot, gradient: gradient * 2 if slot.name in tied else gradient)


def _stale_chunk(booster: Booster) -> Patches:
    chunk = _data(booster).chunks[1]

    def forget() -> None:
        chunk.phase = Phase.IDLE

    return [patch.object(chunk, "forget", forget)]


def _norm_per_replica(booster: Booster) -> Patches:
    def squares(tensors: Any, mesh: Any) -> torch.Tensor:
        return torch.stack([tensor.double().square().sum() for _, tensor in tensors]).sum()

    return [patch("lindos.booster.step.owned_squares", squares)]


def _fp32_accumulate(booster: Booster) -> Patches:
    # through numpy: the proof's own mode would lift a cast by torch
    return _puts(booster, lambda slot, gradient: torch.from_numpy(gradient.numpy().astype("float32")))


def _rate_not_passed(booster: Booster) -> Patches:
    inner = booster._inner
    assert inner is not None
    own, first = inner.step, [group["lr"] for group in inner.param_groups]

    def step(*args: Any) -> None:
        now = [group["lr"] for group in inner.param_groups]
        for group, rate in zip(inner.param_groups, first):
            group["lr"] = rate
        own(*args)
        for group, rate in zip(inner.param_groups, now):
            group["lr"] = rate

    return [patch.object(inner, "step", step)]


def _clip_before_reduce(booster: Booster) -> Patches:
    data = _data(booster)
    own, limit, scale = data.close, booster.max_norm or 1.0, data.scale

    def close() -> None:
        local = torch.stack([g.double().square().sum() for _, g in data.gradients()]).sum().sqrt() / scale
        data.rescale(float(torch.clamp(limit / (local + 1e-6), max=1.0)))
        own()

    return [patch.object(data, "_advance", lambda: None), patch.object(data, "close", close)]


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("reduce skipped or doubled", "a reduction was skipped or done twice", _skip),
        Fault("sum for mean", "gradients are summed over dp where a mean is due", _sum_for_mean),
        Fault("shift after the cut", "labels are shifted after the sequence is cut", _shift_after_cut),
        Fault("count of position 0", "the count takes in position 0, which nothing predicts", _count_position_0),
        Fault("wrong kv group", "query heads attend to the kv heads of another group", _wrong_kv_group),
        Fault("mask dropped", "the attention mask does not reach the attention", _mask_dropped),
        Fault("tied gradient twice", "the gradient of a tied weight is counted twice", _tied_twice),
        Fault("stale chunk", "a chunk carries values of an earlier step", _stale_chunk),
        Fault("norm per replica", "the norm counts replicas as if they were different elements", _norm_per_replica),
        Fault("fp32 accumulation", "gradients are accumulated in fp32 where fp64 is due", _fp32_accumulate),
        Fault(
            "learning rate not passed", "the optimizer does not step with the scheduled learning rate", _rate_not_passed
        ),
        Fault("clip before reduce", "each rank clips its own gradient before the reduction", _clip_before_reduce),
    )
}
VARIANTS = {"reduce doubled": Fault("reduce skipped or doubled", FAULTS["reduce skipped or doubled"].says, _double)}


@contextmanager
def plant(name: str, booster: Booster) -> Iterator[None]:
    """Break one booster in one way; an empty name breaks nothing."""
    if not name:
        yield
        return
    known = {**FAULTS, **VARIANTS}
    if name not in known:
        raise InputError(f"fault {name!r}: {nearest(name, known)}.")
    patches = known[name].make(booster)
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in reversed(patches):
            one.stop()
