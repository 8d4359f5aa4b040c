"""Prove every causal type of transformers, one by one, and write the table of what may run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lindos.booster.compose import ledger_of
from lindos.comm.ranks import Ranks, pool
from lindos.core.errors import InputError, RefusedError, nearest
from lindos.core.mesh import Mesh
from lindos.hf import models, proven, twin
from lindos.proof.case import Case
from lindos.proof.prove import prove, rules_and_shape


@dataclass
class Line:
    """What was found for one type.

    Attributes:
        type: of transformers.
        shape: of the plan, as the table has it.
        verdict: "equal", "refused", "differs", or "failed" where the model breaks under the plan.
        reason: why it was refused or where it differs.
        cut: share of the default configuration's parameters that are really cut, tables and the vocabulary left out.
        rules: hashes of its rules.
        seconds: that it took.
    """

    type: str
    shape: str = ""
    verdict: str = "refused"
    reason: str = ""
    cut: float = 0.0
    rules: frozenset[str] = field(default_factory=frozenset)
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        """For programs."""
        return {**vars(self), "rules": sorted(self.rules)}

    def text(self) -> str:
        cut = f"{self.cut:4.0%} cut" if self.cut else " " * 8
        return f"{self.type:26} {self.verdict:8} {self.shape:14} {cut} {self.seconds:5.1f} s  {self.reason[:160]}"


def prove_all(
    types: Iterable[str] | None = None,
    ranks: Ranks | None = None,
    show: Callable[[str], Any] | None = None,
    table: Path | None = None,
    **options: Any,
) -> list[Line]:
    """Prove types one by one under one plan.

    Args:
        types: of transformers; default all causal ones.
        ranks: the pool that they run on.
        show: takes a line of text for each type as it is done; default prints it.
        table: JSON file that verdicts are added to (`hf/proven.json` is the one that ships).
        **options: of `prove`: tp, dp, steps, micro_batches, twin, ...
    """
    models.quiet()
    wanted = list(twin.types() if types is None else types)
    for name in wanted:
        if name not in twin.types():
            raise InputError(f"{name!r} is no causal type of transformers: {nearest(name, twin.types())[:300]}")
    pool_of_ranks, lines = ranks or pool(), []
    for number, name in enumerate(wanted, 1):
        started = time.monotonic()
        line = _line(name, pool_of_ranks, options)
        line.seconds = time.monotonic() - started
        lines.append(line)
        (show or _say)(f"{number:3}/{len(wanted)} {line.text()}")
        if table is not None and (line.shape or (line.verdict == "refused" and "twin" not in options)):
            _record(table, line)
    return lines


def _say(text: str) -> None:
    print(text, flush=True)


def _line(model_type: str, ranks: Ranks, options: dict[str, Any]) -> Line:
    line = Line(model_type)
    try:
        report = prove(type=model_type, ranks=ranks, **options)
    except (InputError, RefusedError) as error:
        line.reason = _last(str(error))
        return line
    except Exception as error:  # the model breaks when it is cut: a fault, whoever makes it
        line.verdict, line.reason = "failed", f"{type(error).__name__}: {_last(str(error))}"
        return line
    line.verdict = report.verdict
    line.reason = (report.differences[0].text() + "; " if report.differences else "") + report.reason
    case = report.case
    if line.verdict != "refused" and case.plugin.tp > 1 and case.plugin.rules is None:
        model = case.model(torch.float32)
        read, line.shape = rules_and_shape(model, case.plugin)
        line.rules = proven.lines_of(model, read.rules, read.heads)
        line.cut = share_cut(model_type, case)
    return line


def _last(text: str) -> str:
    return text.strip().splitlines()[-1][:300] if text.strip() else ""


def share_cut(model_type: str, case: Case) -> float:
    """Share of the default configuration's parameters that tp really cuts, tables and the vocabulary left out."""
    try:
        with torch.device("meta"):
            model = models.model_of(models.config_of(model_type))
    except Exception:  # a default that transformers itself cannot build: its twin has the same pattern
        model = case.model(torch.float32)
    read, _ = rules_and_shape(model, case.plugin)
    ledger = ledger_of(model)
    read.contribute(ledger, Mesh.of(0, tp=case.plugin.tp))
    return 1 - sum(read.left_bytes(ledger).values()) / max(1, read.inner_bytes(ledger))


def _record(table: Path, line: Line) -> None:
    if line.shape:
        proven.remember(line.type, line.rules, line.shape, line.verdict, table)
    found = json.loads(json.dumps(proven.read(table)))
    entry = found.setdefault(proven.minor(models.version()), {}).setdefault(line.type, {})
    entry.update(
        {"cut": round(line.cut, 3)} if line.cut else {},
        **({"reason": line.reason} if line.reason and "equal" not in entry.get("shapes", {}).values() else {}),
    )
    proven.write(table, found)


def page(table: Path) -> str:
    """The table as a page of the docs: a line a type, a column a plan shape."""
    found = proven.read(table)
    shapes = sorted(
        {s for types in found.values() for entry in types.values() for s in entry.get("shapes", {})}, key=len
    )
    lines = [
        "# What is proven",
        "",
        "Written by `lindos prove --all --table lindos/hf/proven.json --page docs/proven.md`. A cell lists the minors",
        "of transformers with which a small model of the type's default pattern trains under the plan shape exactly as",
        "in one process ([proof.md](proof.md)). `tp`: heads cut evenly; `tp shared`: fewer kv heads than ranks;",
        "`tp uneven`: heads that do not divide. Data parallelism does not touch modules, so it goes with each of them.",
        "*cut* is the share of the default configuration's parameters, tables and vocabulary left out, of which every",
        "rank holds a part only.",
        "",
        "| type | " + " | ".join(shapes) + " | cut | not equal, because |",
        "| --- |" + " --- |" * (len(shapes) + 2),
    ]
    for name in sorted({name for types in found.values() for name in types}):
        entries = {version: types[name] for version, types in sorted(found.items()) if name in types}
        cells = [
            ", ".join(v for v, entry in entries.items() if entry.get("shapes", {}).get(shape) == "equal")
            for shape in shapes
        ]
        cut = max((entry.get("cut", 0.0) for entry in entries.values()), default=0.0)
        reasons: dict[str, list[str]] = {}
        for version, entry in entries.items():
            if entry.get("reason"):
                reasons.setdefault(entry["reason"].replace("|", "/")[:160], []).append(version)
        reason = "; ".join(f"{', '.join(versions)}: {text}" for text, versions in reasons.items())
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {f'{cut:.0%}' if cut else ''} | {reason} |")
    return "\n".join(lines) + "\n"


def summary(lines: list[Line]) -> str:
    """Counts, in words."""
    count = {
        verdict: sum(line.verdict == verdict for line in lines) for verdict in ("equal", "refused", "differs", "failed")
    }
    wide = sum(line.cut >= 0.6 for line in lines if line.verdict == "equal")
    total = sum(line.seconds for line in lines)
    return (
        f"{len(lines)} types: {count['equal']} equal, {count['refused']} refused, {count['differs']} differ, "
        f"{count['failed']} fail; "
        f"{wide} with at least 60 % of their inner parameters cut; {total / 60:.1f} minutes"
    )
