"""Ledger: one line per parameter, buffer, gradient and optimizer state. The only place that knows how tensors lie.

Axes write their column (`in_use`, `sum_over`, `at_rest`); norms, optimizers, checkpoints and reports only read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lindos.core.errors import InputError, nearest
from lindos.core.layout import Layout
from lindos.core.mesh import Mesh
from lindos.core.units import text_of_bytes, text_of_count

KINDS = ("parameter", "buffer", "gradient", "state")
ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass
class Entry:
    """One tensor as the whole world sees it.

    Attributes:
        name: dotted name in the model; gradients and states carry the name of their parameter after a slash.
        kind: "parameter", "buffer", "gradient" or "state".
        role: what its module is to tensor parallelism.
        dtype: dtype at rest, as text.
        at_rest: what a rank stores between steps.
        in_use: what a rank computes with.
        sum_over: axes that cut the activation but neither cut nor gather the parameter, so that its gradient on one
            rank is a part of a sum over them.
        stage: pipeline stage that holds it.
        home: "device", "host" or "disk".
        tied: other names of the same tensor.
        trained: whether it has a gradient.
        inside: it lies in the memory of the parameter's own line and takes none itself.
    """

    name: str
    kind: str
    role: str
    dtype: str
    at_rest: Layout
    in_use: Layout
    sum_over: tuple[str, ...] = ()
    stage: int = 0
    home: str = "device"
    tied: tuple[str, ...] = ()
    trained: bool = True
    inside: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.in_use.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def local_bytes(self, mesh: Mesh, rank: int | None = None) -> int:
        """Bytes that a rank stores for it, padding included."""
        return 0 if self.inside else math.prod(self.at_rest.local_shape(mesh, rank)) * ITEM_BYTES[self.dtype]

    def line(self) -> str:
        sums = f" sum over {','.join(self.sum_over)}" if self.sum_over else ""
        tied = f" = {', '.join(self.tied)}" if self.tied else ""
        frozen = "" if self.trained or self.kind != "parameter" else " frozen"
        at_rest = "" if self.at_rest == self.in_use else f" at rest {self.at_rest.text('')}"
        return f"{self.in_use.text(self.name)} {self.dtype} {self.role}{at_rest}{sums}{frozen} {self.home}{tied}"


@dataclass
class Ledger:
    """Entries by (kind, name), in the order of the model."""

    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)

    def add(self, entry: Entry) -> Entry:
        key = (entry.kind, entry.name)
        if entry.kind not in KINDS or key in self.entries:
            raise AssertionError(f"ledger entry {key} is of no known kind or written twice")
        self.entries[key] = entry
        return entry

    def of(self, kind: str) -> Iterator[Entry]:
        return (entry for entry in self.entries.values() if entry.kind == kind)

    def parameter(self, name: str) -> Entry:
        """The entry of a parameter under any of its names.

        Raises:
            InputError: no such parameter; names the nearest.
        """
        found = self.entries.get(("parameter", name))
        if found is not None:
            return found
        for entry in self.of("parameter"):
            if name in entry.tied:
                return entry
        names = [entry.name for entry in self.of("parameter")]
        raise InputError(f"the model has no parameter {name!r}: {nearest(name, names)[:400]}.")

    def kept(self, name: str) -> Layout:
        """Which part of a parameter's master, reduced gradient and elementwise states a rank keeps."""
        entry = self.parameter(name)
        master = self.entries.get(("state", f"{entry.name}/master"))
        return entry.at_rest if master is None else master.at_rest

    def local_bytes(self, kinds: Iterable[str], mesh: Mesh, rank: int | None = None) -> int:
        """Bytes that a rank stores for these kinds."""
        return sum(entry.local_bytes(mesh, rank) for kind in kinds for entry in self.of(kind))

    def digest(self) -> str:
        """Hash of everything that must be the same on all ranks."""
        lines = [f"{key}: {entry!r}" for key, entry in self.entries.items()]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    def text(self, mesh: Mesh) -> str:
        """The printed report: totals by kind, then a line per parameter; lines that repeat over layers are one."""
        totals = [
            f"{kind:>10}: {text_of_bytes(self.local_bytes([kind], mesh, mesh.rank or 0))} a rank"
            for kind in KINDS
            if any(True for _ in self.of(kind))
        ]
        count = sum(entry.numel for entry in self.of("parameter"))
        return "\n".join([f"{text_of_count(count)} parameters", *totals, *_folded(self.of("parameter"))])


def _folded(entries: Iterable[Entry]) -> list[str]:
    """Lines with numbers in names folded: `layers.{0..31}.mlp...`."""
    groups: dict[str, list[list[int]]] = {}
    for entry in entries:
        line, names = entry.line(), (entry.name, *entry.tied)
        middle = line.removeprefix(entry.name)
        if entry.tied:
            middle = middle.removesuffix(", ".join(entry.tied))
        folded = [".".join("#" if part.isdigit() else part for part in name.split(".")) for name in names]
        numbers = [int(part) for name in names for part in name.split(".") if part.isdigit()]
        groups.setdefault(folded[0] + middle + ", ".join(folded[1:]), []).append(numbers)
    lines = []
    for line, numbers in groups.items():
        for column in zip(*numbers):
            line = line.replace("#", _span(sorted(set(column))), 1)
        lines.append("  " + line)
    return lines


def _span(numbers: list[int]) -> str:
    """`3`, `{0..31}`, or with gaps `{0..4,6..10}`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"
