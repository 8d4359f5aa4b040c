"""Prove that a plan is the same training run as one process: loss, every gradient, every weight, after real steps."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from lindos.booster.plugins import Plugin
from lindos.comm.ranks import Ranks, pool
from lindos.core.errors import InputError, LayoutError, RefusedError, RulesError
from lindos.hf import models, proven
from lindos.hf.rules import rules_of
from lindos.hf.twin import twin_config
from lindos.parallel.tensor.kind import Tensor
from lindos.proof import compare
from lindos.proof.case import OPTIMIZERS, Case, plugin_of
from lindos.proof.causes import likely_cause
from lindos.proof.reference import Trace
from lindos.proof.report import Report
from lindos.proof.sides import Side, in_one_process, numbers, on_ranks

TRIES = 3  # data that an fp32 run may be compared on: a fault in fp32 shows on all of it


def prove(
    type: str | None = None,
    *,
    model: str | None = None,
    kind: str | None = None,
    dp: int = 1,
    plugin: str | None = None,
    ranks: Ranks | None = None,
    **options: Any,
) -> Report:
    """Train a small twin under a plan and in one process, and compare every number.

    Both sides run in fp64 with SGD and AdamW, then in fp32; dp ranks get different rows, lengths and padding; the
    learning rate changes at every step. The reference is plain transformers and torch.

    Args:
        type: a transformers type; its default configuration, scaled down, keeps its pattern.
        model: a model folder, whose configuration is scaled down instead.
        kind: causal, conditional, masked, image, sequence or token; default the first of them that the type has.
        dp: data-parallel size.
        plugin: ddp, hybrid, zero1, zero2, gemini_auto or gemini_static; default by the axes.
        ranks: a pool to run on; default the process's own.
        **options: tp, pp, sp, zero and other fields of the plugin; micro_batches, max_norm, steps; `twin`, a dict of
            overrides for the twin (heads, kv_heads, vocabulary, tied, ...); `fault`, a planted fault.

    Returns:
        Report with verdict "equal", "refused" or "differs".

    Raises:
        InputError: no type and no model, an option that does not exist.
    """
    if (type is None) == (model is None):
        raise InputError("prove takes a type or a model folder: prove(type='llama', tp=2).")
    made = {k: options.pop(k) for k in ("micro_batches", "max_norm", "steps", "fault") if k in options}
    overrides = tuple(sorted((options.pop("twin", None) or {}).items()))
    axes = {k: v for k, v in options.items() if not (k == "rules" and v is None)}
    plan = plugin_of(plugin, axes)
    if model and not overrides and plan.tp > 1 and plan.rules is None:
        overrides = _sizes_like(model, plan)
    case = Case(type or "", model or "", kind or "", plan, dp, overrides, **made)
    report = Report(case)
    started = time.monotonic()
    try:
        plan.refuse_unserved()
        _run(case, report, ranks or pool())
    except (RefusedError, LayoutError, RulesError) as error:
        report.verdict, report.reason = "refused", str(error)
    report.seconds = time.monotonic() - started
    if report.verdict != "refused":
        remember(case, report.verdict)
    return report


def _sizes_like(folder: str, plan: Plugin) -> tuple[tuple[str, Any], ...]:
    """Sizes of a twin whose heads meet tp as the real model's do: evenly, unevenly, or shared by neighbours."""
    config = models.config_of(folder)
    with torch.device("meta"):
        real = models.model_of(config)
    try:
        _, shape = rules_and_shape(real, plan)
    except (RefusedError, LayoutError):
        return ()
    for sizes in proven.twin_sizes(shape, plan.tp):
        try:
            twin_config(config, **sizes)
            return tuple(sorted(sizes.items()))
        except InputError:
            continue
    return ()


def remember(case: Case, verdict: str, path: Path | None = None) -> Tensor | None:
    """What was proven here of inferred rules goes into this machine's table, or another."""
    if case.plugin.tp == 1 or case.plugin.rules is not None or case.fault:
        return None
    model = case.model(torch.float32)
    read, shape = rules_and_shape(model, case.plugin)
    lines = proven.lines_of(model, read.rules, read.heads)
    proven.remember(proven.name_of(model), lines, shape, verdict, path)
    return read


def rules_and_shape(model: torch.nn.Module, plugin: Plugin) -> tuple[Tensor, str]:
    """The inferred rules of a model, matched, and the shape of a plan on it.

    Raises:
        RefusedError, LayoutError: there are none, or tp cannot cut it.
    """
    read = Tensor(rules_of(model, plugin.tp), plugin.tensor).read(model, plugin.tp)
    axes = {"pp": plugin.pp, "sp": plugin.sp, "tp": plugin.tp}
    return read, proven.shape_of(axes, read.heads.values())


def _run(case: Case, report: Report, ranks: Ranks) -> None:
    for optimizer in OPTIMIZERS:
        true = in_one_process(case, optimizer, torch.float64)
        side = _plan_side(case, optimizer, torch.float64, ranks)
        _judge(report, f"fp64 {optimizer}", case, side, true, compare.exact(side.trace, true))
        if report.verdict != "equal":
            return
        if not _rounded(case, optimizer, report, ranks, true):
            return


def _rounded(case: Case, optimizer: str, report: Report, ranks: Ranks, true: Trace) -> bool:
    """The fp32 run. Where only rounding decided (a token between two experts), other data decides otherwise."""
    for seed in range(case.seed, case.seed + TRIES):
        again = dataclasses.replace(case, seed=seed)
        true = true if seed == case.seed else in_one_process(again, optimizer, torch.float64)
        own = [in_one_process(again, optimizer, torch.float32, turned) for turned in (False, True)]
        side = _plan_side(again, optimizer, torch.float32, ranks)
        found = compare.rounded(side.trace, own, true)
        if not found or side.drifted:
            break
    _judge(report, f"fp32 {optimizer}", again, side, true, found)
    if seed > case.seed:
        report.runs[f"fp32 {optimizer}"]["worst"] += f" (data {seed}: rounding decided a tie in the data before)"
    return report.verdict == "equal"


def _plan_side(case: Case, optimizer: str, dtype: torch.dtype, ranks: Ranks) -> Side:
    return ranks.run(on_ranks, case.world_size, case, optimizer, dtype)[0]


def _judge(report: Report, run: str, case: Case, side: Side, true: Trace, found: list[compare.Difference]) -> None:
    drift = [compare.Difference(step, "replica of", name, 1.0, 0.0) for step, name in side.drifted]
    worst = max((d for step in range(case.steps) for d in _distances(side.trace, true, step)), key=lambda d: d[0])
    report.runs[run] = {**numbers(side.trace), "worst": f"largest gradient distance {worst[0]:.1e} at {worst[1]}"}
    if found or drift:
        report.verdict, report.run, report.differences = "differs", run, (found + drift)[:20]
        report.reason = (
            likely_cause(case, side, true, found) if found else "replicas of a tensor are not bit-equal after a step"
        )


def _distances(mine: Trace, true: Trace, step: int) -> list[tuple[float, str]]:
    whole = sum(float(g.double().square().sum()) for g in true.gradients[step].values()) ** 0.5
    return [
        (float((mine.gradients[step][n].double() - g.double()).norm()) / max(float(g.double().norm()), 1e-6 * whole), n)
        for n, g in true.gradients[step].items()
    ]
