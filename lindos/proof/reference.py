"""The reference: the training run that every plan must repeat, written as plainly as PyTorch allows.

It shares no code with what it checks: the unmodified model, a loss of its own over the global count, torch's optimizer
and torch's clipping, in one process.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lindos.core.errors import InputError, NumbersError, RefusedError
from lindos.proof.double import Double

Share = dict[str, Any]
IGNORED = -100


@dataclass
class Trace:
    """What a run did, one item per step.

    `gradients` are whole, before clipping, and by the names of `model.named_parameters()`, a tied parameter once.
    `weights` are those after the step. `lrs` is the rate of the first parameter group that the step was done with.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def reference(
    model: nn.Module,
    batches: Sequence[Share | Sequence[Share]],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    max_norm: float | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    precise: bool = True,
    kind: str = "causal",
) -> Trace:
    """Trains `model` in place for one step per batch and records everything.

    A batch is what all ranks see together: one dict, or a list of shares that may differ in rows and length. The loss
    is the sum of the cross entropies of every valid position of every share, divided by their number. With an encoder
    and a decoder the model is given the labels, of which it makes the decoder's inputs itself.

    Args:
        model: A plain model; its mode (training or not) stays.
        batches: Per step a dict of tensors with `labels`, or a list of such dicts.
        optimizer: Makes the optimizer from the parameters: `lambda p: torch.optim.SGD(p, lr=0.1)`.
        max_norm: Clips the whole gradient to this norm.
        scheduler: Makes the scheduler from the optimizer; it steps after every step.
        precise: Runs an fp64 model under `Double`.
        kind: "causal" compares a position with the next token; every other kind with its own label.

    Raises:
        InputError: A step has no valid position.
        NumbersError: A loss is not finite, so there is nothing to compare with.
        RefusedError: The logits do not fit the labels.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    stepper = optimizer(parameters := list(named.values()))
    schedule = scheduler(stepper) if scheduler else None
    double = precise and all(parameter.dtype is torch.float64 for parameter in parameters)
    trace = Trace()
    for step, batch in enumerate(batches):
        shares = [batch] if isinstance(batch, dict) else list(batch)
        count = sum(_valid(share, kind) for share in shares)
        if count == 0:
            raise InputError(
                f"step {step} must have a position with a label, all shifted labels are {IGNORED}. Add rows"
            )
        stepper.zero_grad(set_to_none=True)
        with Double() if double else nullcontext():
            trace.losses.append(sum(_backward(model, share, count, kind) for share in shares))
        if not math.isfinite(trace.losses[-1]):
            raise NumbersError(
                f"the reference's loss at step {step} must be finite, got {trace.losses[-1]}. Lower the rate"
            )
        _fill_with_zeros(parameters)
        trace.gradients.append({name: parameter.grad.detach().clone() for name, parameter in named.items()})
        trace.grad_norms.append(_norm(parameters, max_norm))
        trace.counts.append(count)
        trace.lrs.append(float(stepper.param_groups[0]["lr"]))
        stepper.step()
        if schedule is not None:
            schedule.step()
        trace.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    stepper.zero_grad(set_to_none=True)
    return trace


def _fill_with_zeros(parameters: list[nn.Parameter]) -> None:
    """Gives what nothing used a zero gradient: it still decays, and moves by its momentum."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _valid(share: Share, kind: str) -> int:
    """Positions of a share that count: those with a label, of the next token where the kind is causal."""
    labels = share["labels"][:, 1:] if kind == "causal" else share["labels"]
    return int((labels != IGNORED).sum())


def _backward(model: nn.Module, share: Share, count: int, kind: str) -> float:
    """Adds the share's part of the gradient and returns its part of the loss."""
    loss = _sum_of_losses(_logits(model, share, kind), share["labels"], kind) / count
    loss.backward()
    return loss.item()


def _logits(model: nn.Module, share: Share, kind: str) -> Tensor:
    inputs = {name: value for name, value in share.items() if name != "labels" or kind == "conditional"}
    accepted = inspect.signature(model.forward).parameters
    if kind in ("causal", "conditional") and (
        "use_cache" in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    ):
        inputs["use_cache"] = False
    out = model(**inputs)
    logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    expected = tuple(share["labels"].shape)
    if not isinstance(logits, Tensor) or tuple(logits.shape[:-1]) != expected:
        given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise RefusedError(
            f"the reference needs logits of the labels' shape {expected} and one dim more (of causal models: [rows, "
            f"length, vocabulary]), {type(model).__name__} gave {given}. Only such models are compared so far"
        )
    return logits


def _sum_of_losses(logits: Tensor, labels: Tensor, kind: str) -> Tensor:
    """Sum of the cross entropies of each position with its label or the next token, in fp32 or better."""
    if kind == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    predicted = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = predicted.reshape(-1, predicted.shape[-1])
    return F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")


def _norm(parameters: list[nn.Parameter], max_norm: float | None) -> float:
    """Norm of the whole gradient, which is clipped to `max_norm` if that is given."""
    if max_norm is not None:
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))
    return float(nn.utils.get_total_norm([parameter.grad for parameter in parameters]))
