"""Likely causes: which known fault leaves the trace that was found.

Two kinds of evidence. What a fault does to numbers that are there (a ratio that is dp exactly, a count off by one a
row, a difference that is last step's gradient); and, where a loss differs, the reference run once more with the fault
built into it: if that gives the plan's loss to the last digits, the cause is found.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from lindos.proof.case import Case
from lindos.proof.compare import Difference
from lindos.proof.double import Double
from lindos.proof.faults import FAULTS, shifted_in_halves
from lindos.proof.reference import Trace
from lindos.proof.sides import Side

CLOSE = 1e-9


def likely_cause(case: Case, side: Side, true: Trace, found: list[Difference]) -> str:
    """Name of the fault that explains the first differences, or a sentence of what is known."""
    first = found[0]
    mine = side.trace
    if first.what == "count":
        return (
            _named("count of position 0")
            if _counts_position_0(case, mine, first.step)
            else "positions are counted otherwise"
        )
    if first.what == "loss":
        return _cause_of_loss(case, mine.losses[0], first)
    if first.what == "gradient":
        return _cause_of_gradient(case, side, true, found)
    if first.what == "norm":
        return (
            _named("norm per replica")
            if mine.grad_norms[first.step] > true.grad_norms[first.step]
            else "the norm leaves elements out"
        )
    if first.what in ("weight", "rate"):
        return _cause_of_weight(mine, true, first)
    return "unknown"


def _named(name: str) -> str:
    return f"{name}: {FAULTS[name].says}"


def _counts_position_0(case: Case, mine: Trace, step: int) -> bool:
    if case.kind_meant != "causal":
        return False
    model = case.model(torch.float32)
    labels = [case.share(model.config, step, dp)["labels"] for dp in range(case.dp)]
    return mine.counts[step] == sum(int((share != -100).sum()) for share in labels)


def _cause_of_loss(case: Case, loss: float, first: Difference) -> str:
    if first.step == 0 and case.kind_meant == "causal":
        for name, options in (
            ("mask dropped", {"mask": False}),
            ("shift after the cut", {"halves": True}),
            ("wrong kv group", {"roll": True}),
        ):
            if _matches(_loss_with(case, **options), loss):
                return _named(name)
    return "the forward differs: a cut weight, a mask or a position is used wrongly"


def _matches(a: float, b: float) -> bool:
    return math.isfinite(a) and abs(a - b) <= CLOSE * abs(b)


@torch.no_grad()
def _loss_with(case: Case, mask: bool = True, halves: bool = False, roll: bool = False) -> float:
    """Loss of the first step by one process that makes one mistake."""
    model = case.model(torch.float64)
    if roll:
        _roll_kv_heads(model)
    total = count = 0.0
    with Double():
        for dp in range(case.dp):
            share = case.share(model.config, 0, dp)
            labels = share.pop("labels")
            if not mask:
                share.pop("attention_mask")
            logits = model(**share, use_cache=False).logits
            right = F.pad(labels[:, 1:], (0, 1), value=-100)
            used = shifted_in_halves(labels) if halves else right
            total += float(F.cross_entropy(logits.flatten(0, 1), used.flatten(), reduction="sum", ignore_index=-100))
            count += int((right != -100).sum())
    return total / count


def _roll_kv_heads(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("k_proj", "v_proj"):
            size = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", 0)
            for parameter in module.parameters(recurse=False):
                parameter.copy_(parameter.roll(-size, 0))


def _cause_of_gradient(case: Case, side: Side, true: Trace, found: list[Difference]) -> str:
    step = found[0].step
    mine, theirs = side.trace.gradients[step], true.gradients[step]
    bad = [d.name for d in found if d.step == step and d.what == "gradient"]
    by = [d.by for d in found if d.step == step and d.what == "gradient"]
    if max(by) < 1e-6:
        return _named("fp32 accumulation")
    ratios = {name: _ratio(mine[name], theirs[name]) for name in bad}
    tied = _tied(case)
    if set(bad) <= tied and all(_is(r, 2.0) for r in ratios.values()):
        return _named("tied gradient twice")
    if step > 0 and all(_contains(mine[n] - theirs[n], side.trace.gradients[step - 1][n]) for n in bad):
        return _named("stale chunk")
    if case.dp > 1 and all(_is(r, float(case.dp)) for r in ratios.values()):
        trained = [n for n in theirs if float(theirs[n].abs().max()) > 0]
        return _named("sum for mean") if len(bad) >= len(trained) else _named("reduce skipped or doubled")
    if case.max_norm is not None and case.dp > 1 and _clipped_locally(case, mine, step):
        return _named("clip before reduce")
    if any(name in bad for at, name in side.drifted if at == step):
        return _named("reduce skipped or doubled") + " (replicas are not equal after the step)"
    return "a gradient is not the whole one: a sum over ranks is missing, too wide, or of the wrong parts"


def _ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    """The factor that explains a from b, or NaN if none does."""
    factor = float((a * b).sum() / (b * b).sum().clamp_min(1e-300))
    rest = float((a - factor * b).norm() / b.norm().clamp_min(1e-300))
    return factor if rest < 1e-6 else math.nan


def _is(a: float, b: float) -> bool:
    return abs(a - b) < 1e-6


def _contains(difference: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a difference is a multiple of the gradient before (which may have been clipped)."""
    return not math.isnan(_ratio(difference, before))


def _tied(case: Case) -> set[str]:
    model = case.model(torch.float32)
    first: dict[int, str] = {}
    return {first[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if first.setdefault(id(p), n) != n}


def _clipped_locally(case: Case, mine: dict[str, torch.Tensor], step: int) -> bool:
    """Whether the mean of gradients that each dp rank has clipped by itself gives what was found."""
    if step > 0 or case.kind_meant != "causal":
        return False
    model = case.model(torch.float64)
    shares = [case.share(model.config, 0, dp) for dp in range(case.dp)]
    count = sum(int((share["labels"][:, 1:] != -100).sum()) for share in shares)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with Double():
        for share in shares:
            labels = F.pad(share.pop("labels")[:, 1:], (0, 1), value=-100)
            logits = model(**share, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
            (loss * case.dp / count).backward()
            parts = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
            norm = float(torch.stack([g.norm() for g in parts.values()]).norm())
            for name, gradient in parts.items():
                total[name] += gradient * min(1.0, (case.max_norm or 1.0) / (norm + 1e-6)) / case.dp
            model.zero_grad()
    return all(float((total[n] - mine[n]).norm()) <= 1e-6 * max(float(total[n].norm()), 1e-9) for n in total)


def _cause_of_weight(mine: Trace, true: Trace, first: Difference) -> str:
    step = first.step
    if first.what == "rate":
        return _named("learning rate not passed")
    before = true.weights[step - 1] if step else None
    if before is not None and true.lrs[step] != true.lrs[0]:
        ratios = [_ratio(mine.weights[step][n] - before[n], true.weights[step][n] - before[n]) for n in before]
        wanted = true.lrs[0] / true.lrs[step]
        moved = [r for r in ratios if not math.isnan(r) and r != 0]
        if moved and all(_is(r, wanted) for r in moved):
            return _named("learning rate not passed")
    return "the optimizer's step differs although gradients are equal: rate, clipping, decay or a stale weight"
