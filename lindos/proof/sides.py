"""The two sides of a proof: the plan on its ranks, and one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from lindos.booster.booster import Booster
from lindos.booster.compose import checksum
from lindos.comm.world import Flight, World
from lindos.memory import tape
from lindos.memory.chunk import Chunk
from lindos.memory.homes import Away, Homes
from lindos.proof.case import OPTIMIZERS, Case, schedule
from lindos.proof.double import Double
from lindos.proof.faults import plant
from lindos.proof.reference import Trace, reference


@dataclass
class Side:
    """What the ranks did: the trace of rank 0 and the replicas that were found to differ, (step, name)."""

    trace: Trace
    drifted: list[tuple[int, str]]


def on_ranks(world: World, case: Case, optimizer: str, dtype: torch.dtype) -> Side:
    """Job of one rank: train the twin under the plan; every rank returns, rank 0's trace is read."""
    torch.set_num_threads(1)
    model = case.model(dtype)
    made = OPTIMIZERS[optimizer](model.parameters())
    rates = schedule(made)
    booster = Booster(case.plugin, max_norm=case.max_norm, micro_batches=case.micro_batches)
    model, made, _, rates = booster.boost(model, made, scheduler=rates)
    names = [name for name, _ in model.named_parameters()]
    trace, drifted = Trace(), []

    def observe() -> None:
        trace.gradients.append({name: booster.gradient(name) for name in names})

    booster._observe = observe
    config = model.config
    dp = booster.mesh.coordinate("dp")
    with _doubled(dtype, booster), plant(case.fault, booster):
        for step in range(case.steps):
            result = booster.step(case.share(config, step, dp))
            trace.losses.append(result.loss)
            trace.grad_norms.append(result.grad_norm)
            trace.counts.append(result.count)
            trace.lrs.append(result.lr or 0.0)
            trace.weights.append({name: booster.full(name) for name in names})
            drifted += [(step, name) for name in _drifted(booster, names)]
    return Side(trace if world.rank == 0 else Trace(), drifted)


@contextmanager
def _doubled(dtype: torch.dtype, booster: Booster) -> Iterator[None]:
    """For fp64: the model's own casts are lifted, in its forward and backward; the library's are not."""
    if dtype != torch.float64:
        yield
        return
    double, stepping = Double(), booster._stepping
    gradients = stepping.gradients

    def lifted(batch: Any) -> Any:
        with double:
            return gradients(batch)

    with ExitStack() as stack:
        stack.enter_context(patch.object(stepping, "gradients", lifted))
        for owner, names in (
            (Chunk, ("put", "settle")),
            (Flight, ("poll", "finish")),
            (tape, ("onto",)),
            (Homes, ("evict",)),
            (Away, ("begin",)),
            (World, ("all_reduce", "begin_all_reduce", "all_gather", "reduce_scatter")),
        ):
            for name in names:
                stack.enter_context(patch.object(owner, name, double.outside(getattr(owner, name))))
        yield


def _drifted(booster: Booster, names: list[str]) -> list[str]:
    """Tensors whose replicas are not bit-equal over the ranks that hold them."""
    plan = booster._plan
    assert plan is not None
    sums = {name: checksum(plan.data.value(plan.ledger.parameter(name).name)) for name in names}
    everyone = plan.world.exchange(sums, "replicas")
    found = []
    for name in names:
        layout = plan.ledger.parameter(name).at_rest
        for rank in range(plan.world.size):
            first = layout.holders(plan.world.mesh, rank)[0]
            if everyone[rank][name] != everyone[first][name]:
                found.append(name)
                break
    return found


def in_one_process(case: Case, optimizer: str, dtype: torch.dtype) -> Trace:
    """The reference on all ranks' shares joined."""
    model = case.model(dtype)
    shares = [[case.share(model.config, step, dp) for dp in range(case.dp)] for step in range(case.steps)]
    return reference(model, shares, OPTIMIZERS[optimizer], max_norm=case.max_norm, scheduler=schedule)


def numbers(trace: Trace) -> dict[str, Any]:
    """The scalars of a trace, for a report."""
    return {"losses": trace.losses, "grad_norms": trace.grad_norms, "counts": trace.counts, "lrs": trace.lrs}
