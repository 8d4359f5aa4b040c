"""The two sides of a proof: the plan on its ranks, and one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from lindos.booster.booster import Booster
from lindos.booster.compose import checksum
from lindos.comm.world import Flight, World
from lindos.core.errors import LindosError, RefusedError
from lindos.hf import models
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
    models.quiet()
    model = case.model(dtype)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    made = OPTIMIZERS[optimizer](model.parameters())
    rates = schedule(made)
    other = case.kind_meant == "causal" and models.other_loss(model)
    loss = next_token if other else None  # what the reference computes, where the model's own loss is another
    plugin = dataclasses.replace(case.plugin, unproven=True)
    options = {"max_norm": case.max_norm, "micro_batches": case.micro_batches, "allow": ("whole",)}
    booster = Booster(plugin, loss=loss, **options)
    model, made, _, rates = booster.boost(model, made, scheduler=rates)
    names = [name for name, _ in model.named_parameters()]
    trace, drifted = Trace(), []

    def observe() -> None:
        trace.gradients.append({name: booster.gradient(name) for name in trained})

    booster._observe = observe
    config = model.config
    dp = booster.mesh.coordinate("dp")
    with _doubled(dtype, booster), plant(case.fault, booster):
        for step in range(case.steps):
            result = booster.step(case.share(config, step, dp, dtype))
            trace.losses.append(result.loss)
            trace.grad_norms.append(result.grad_norm)
            trace.counts.append(result.count)
            trace.lrs.append(result.lr or 0.0)
            trace.weights.append({name: booster.full(name) for name in names})
            drifted += [(step, name) for name in _drifted(booster, names)]
    return Side(trace if world.rank == 0 else Trace(), drifted)


def next_token(outputs: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the cross-entropies of each position with the next token, and their number."""
    labels = batch["shift_labels"]
    logits = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32))
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return losses, (labels != -100).sum()


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
            (World, ("all_reduce", "begin_all_reduce", "all_gather", "gather_into", "reduce_scatter")),
        ):
            for name in names:
                stack.enter_context(patch.object(owner, name, double.outside(getattr(owner, name))))
        yield


def _drifted(booster: Booster, names: list[str]) -> list[str]:
    """Tensors whose replicas, of masters or of working copies, are not bit-equal over the ranks that hold them."""
    plan = booster._plan
    assert plan is not None
    own = {name: plan.ledger.parameter(name).name for name in names}
    sums = {name: [checksum(plan.data.value(own[name])), checksum(plan.data.work(own[name]))] for name in names}
    everyone = plan.world.exchange(sums, "replicas")
    found = []
    for name in names:
        layouts = plan.ledger.kept(name), plan.ledger.parameter(name).in_use
        firsts = ((i, rank, layout.holders(plan.world.mesh, rank)[0])
                  for i, layout in enumerate(layouts) for rank in range(plan.world.size))  # fmt: skip
        if any(everyone[rank][name][i] != everyone[first][name][i] for i, rank, first in firsts):
            found.append(name)
    return found


def in_one_process(case: Case, optimizer: str, dtype: torch.dtype, turned: bool = False) -> Trace:
    """The reference on all ranks' shares joined.

    Args:
        turned: the same rows in the opposite order: the same mathematics, other sums.

    Raises:
        RefusedError: the plain model itself fails on such batches.
    """
    model = case.model(dtype)
    shares = [[case.share(model.config, step, dp, dtype) for dp in range(case.dp)] for step in range(case.steps)]
    if turned:
        shares = [[{k: v.flip(0) for k, v in share.items()} for share in step[::-1]] for step in shares]
    options = {"max_norm": case.max_norm, "scheduler": schedule, "kind": case.kind_meant}
    try:
        return reference(model, shares, OPTIMIZERS[optimizer], **options)
    except LindosError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise RefusedError(
            f"{type(model).__name__} fails in one process already, on a plain batch of its kind: "
            f"{type(error).__name__}: {text}"
        ) from error


def numbers(trace: Trace) -> dict[str, Any]:
    """The scalars of a trace, for a report."""
    return {"losses": trace.losses, "grad_norms": trace.grad_norms, "counts": trace.counts, "lrs": trace.lrs}
