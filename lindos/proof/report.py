"""The report of a proof: a verdict, and when it is not `equal`, the first tensor, by how much, and the likely cause."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from lindos.proof.case import Case
from lindos.proof.compare import Difference

EXIT_CODES = {"equal": 0, "refused": 3, "differs": 4}


@dataclass
class Report:
    """
    Attributes:
        verdict: "equal", "refused" or "differs".
        reason: why it was refused, or the likely cause of the difference.
        differences: the first ones, by run.
        runs: what was compared, with the largest relative distance that was seen.
    """

    case: Case
    verdict: str = "equal"
    reason: str = ""
    run: str = ""
    differences: list[Difference] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def text(self) -> str:
        """One line for the verdict, then what was compared."""
        plan = self.case.plugin
        head = f"{self.case.model_type or self.case.folder} at dp={self.case.dp} tp={plan.tp} pp={plan.pp} sp={plan.sp}"
        if self.verdict == "equal":
            lines = [f"equal: {head}, {self.case.steps} steps, {self.seconds:.1f} s"]
        elif self.verdict == "refused":
            lines = [f"refused: {head}: {self.reason}"]
        else:
            first = self.differences[0]
            lines = [f"differs: {head}: {self.run}: {first.text()}; likely cause: {self.reason}"]
            lines += [f"  {d.text()}" for d in self.differences[1:6]]
        return "\n".join([*lines, *(f"  {name}: {facts['worst']}" for name, facts in self.runs.items())])

    def json(self) -> str:
        """The report for programs."""
        facts = {
            "verdict": self.verdict,
            "reason": self.reason,
            "run": self.run,
            "model": self.case.model_type or self.case.folder,
            "plan": {
                k: v for k, v in asdict(self.case.plugin).items() if isinstance(v, int | str | float | bool | None)
            },
            "dp": self.case.dp,
            "micro_batches": self.case.micro_batches,
            "max_norm": self.case.max_norm,
            "steps": self.case.steps,
            "differences": [asdict(d) for d in self.differences],
            "runs": self.runs,
            "seconds": round(self.seconds, 2),
        }
        return json.dumps(facts, indent=1)
