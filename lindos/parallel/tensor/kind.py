"""The tensor axis: roles into the ledger, then forwards into the model."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn

from lindos.comm.world import World
from lindos.core.errors import RulesError, nearest
from lindos.core.ledger import ITEM_BYTES, Entry, Ledger
from lindos.core.mesh import Mesh
from lindos.core.rules import Rule, Rules
from lindos.core.units import text_of_bytes
from lindos.parallel.tensor import attention
from lindos.parallel.tensor.forwards import Crossing, install
from lindos.parallel.tensor.heads import Heads, all_heads, home_of, input_dim
from lindos.parallel.tensor.roles import AXIS, Partial, write
from lindos.parallel.tensor.tables import table_of

WEIGHTED = ("column", "row", "gathered_column", "split_row", "inner_column", "whole_output", "vocabulary_embedding",
            "vocabulary_head", "wide_norm", "group_norm", "convolution", "head_table")  # fmt: skip


class Tensor:
    """Tensor parallelism of one model by rules.

    Attributes:
        crossing: the state that the forwards share, once applied.
    """

    def __init__(self, rules: Rules, algorithm: str = "1d") -> None:
        self.rules, self.table = rules, table_of(algorithm)
        self.resolved: dict[str, Rule] = {}
        self.heads: dict[str, Heads] = {}
        self.partial: dict[str, Partial] = {}
        self.crossing: Crossing | None = None
        self.model: nn.Module | None = None

    def read(self, model: nn.Module, parts: int) -> Tensor:
        """Match the rules against the model's modules and bare parameters.

        Raises:
            RulesError: a rule matches nothing, or two match one module.
            LayoutError: heads that tp cannot cut.
        """
        names = [name for name, _ in model.named_modules() if name]
        names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
        names += [name for name, _ in model.named_buffers()]
        self.model, self.resolved = model, self.rules.resolve(names)
        _check(self.resolved, model)
        self.heads = all_heads(self.resolved, self.rules.homes, dict(model.named_modules()), parts)
        return self

    def contribute(self, ledger: Ledger, mesh: Mesh) -> Mesh:
        assert self.model is not None
        if mesh.size(AXIS) > 1:
            mesh, self.partial = write(ledger, mesh, self.resolved, self.heads, self.model, self.table)
        return mesh

    def apply(self, model: nn.Module, ledger: Ledger, world: World) -> None:
        """Forwards, attributes and buffers; parameters are still whole, or on meta."""
        self.crossing = Crossing(world)
        if world.mesh.size(AXIS) == 1:
            return
        install(model, self.resolved, self.crossing, self.heads)
        modules = dict(model.named_modules())
        sizes = {
            home_of(name, rule): modules[name].get_parameter("weight").shape[input_dim(modules[name])]
            for name, rule in self.resolved.items()
            if rule.heads and rule.role in ("row", "split_row")
        }
        for name in self.resolved:
            self._cut_buffer(modules, name, ledger, world)
        attention.localise(model, self.heads, self.rules.homes, sizes, world)

    def finish(self, model: nn.Module, world: World) -> list[str]:
        """Once parameters are this rank's: lines that neighbours share have their gradients summed.

        Returns:
            The sub-axes of tp that forwards and gradients talk over.

        Communicates: in backward, one all_reduce of those lines over the neighbours for each such parameter.
        """
        parameters = dict(model.named_parameters())
        for name, partial in self.partial.items():
            if name in parameters and parameters[name].requires_grad:
                parameters[name].register_hook(_summed(partial, world, name))
        shared = [its for its in self.heads.values() if its.sharing > 1]
        return list(dict.fromkeys(axis for its in shared for axis in (its.held_axis, its.shared_axis)))

    def inner_bytes(self, ledger: Ledger) -> int:
        """Bytes of all parameters but tables and the vocabulary's."""
        return sum(_bytes(entry) for entry in self._inner(ledger))

    def left_bytes(self, ledger: Ledger) -> dict[str, int]:
        """Bytes that stay whole inside the model by the folded name of their module, the largest first."""
        found: dict[str, int] = {}
        for entry in self._inner(ledger):
            if not entry.in_use.cuts:
                name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", entry.name.rpartition(".")[0])
                found[name] = found.get(name, 0) + _bytes(entry)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def left_text(self, ledger: Ledger) -> list[str]:
        """Lines for a report: what stays whole on every rank, how much, and why."""
        left, inner = self.left_bytes(ledger), max(1, self.inner_bytes(ledger))
        lines = [
            f"left whole on every rank of tp: {text_of_bytes(sum(left.values()))}, {sum(left.values()) / inner:.1%}"
        ]
        reasons = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name): why for name, why in self.rules.left.items()}
        for name, size in list(left.items())[:12]:
            why = next((text for home, text in reasons.items() if f"{name}.".startswith(f"{home}.")), "")
            lines.append(f"  {text_of_bytes(size):>10} {name}{': ' * bool(why)}{why}")
        return lines

    def _inner(self, ledger: Ledger) -> Iterator[Entry]:
        assert self.model is not None
        modules = dict(self.model.named_modules())
        for entry in ledger.of("parameter"):
            table = isinstance(modules.get(entry.name.rpartition(".")[0]), nn.Embedding)
            if not table and not entry.role.startswith("vocabulary"):
                yield entry

    def _cut_buffer(self, modules: dict[str, nn.Module], name: str, ledger: Ledger, world: World) -> None:
        entry = ledger.entries.get(("buffer", name))
        if entry is None:
            return
        home, _, suffix = name.rpartition(".")
        whole = modules[home]._buffers[suffix]
        assert whole is not None
        local = whole.new_empty(entry.in_use.local_shape(world.mesh))
        for box in entry.in_use.boxes(world.mesh):
            local[tuple(slice(a, b) for a, b in box.local)] = whole[tuple(slice(a, b) for a, b in box.full)]
        modules[home]._buffers[suffix] = local


def _check(resolved: dict[str, Rule], model: nn.Module) -> None:
    """
    Raises:
        RulesError: a home that is no module, a role that needs a weight on what has none, a dim that is not there.
    """
    modules = dict(model.named_modules())
    for name, rule in resolved.items():
        if rule.home and rule.home not in modules:
            raise RulesError(
                f"rule {rule.pattern!r}: home={rule.home!r} is no module: {nearest(rule.home, modules)[:300]}."
            )
        weight = modules[name]._parameters.get("weight") if name in modules else None
        if name in modules and rule.role in WEIGHTED and (weight is None or weight.dim() < 1):
            kind = type(modules[name]).__name__
            raise RulesError(
                f"rule {rule.pattern!r}: role {rule.role!r} needs a module with a weight; {name} is a {kind}."
            )
        if name not in modules:
            owner, _, leaf = name.rpartition(".")
            tensor = modules[owner]._parameters.get(leaf, modules[owner]._buffers.get(leaf))
            if rule.role not in ("head_parameter", "activation_parameter", "whole"):
                raise RulesError(f"rule {rule.pattern!r}: role {rule.role!r} is of modules; {name} is a parameter.")
            if tensor is not None and not 0 <= rule.dim < max(1, tensor.dim()):
                raise RulesError(f"rule {rule.pattern!r}: dim={rule.dim} is no dim of {name} {list(tensor.shape)}.")


def _bytes(entry: Entry) -> int:
    return entry.numel * ITEM_BYTES[entry.dtype]


def _summed(partial: Partial, world: World, name: str):  # type: ignore[no-untyped-def]
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        lines = torch.cat([gradient.narrow(partial.dim, a, b - a) for a, b in partial.spans], partial.dim)
        wide = lines.to(torch.promote_types(lines.dtype, torch.float32)).contiguous()
        lines = world.all_reduce(wide, partial.axis, f"{name} shared lines").to(lines.dtype)
        at = 0
        for a, b in partial.spans:
            gradient.narrow(partial.dim, a, b - a).copy_(lines.narrow(partial.dim, at, b - a))
            at += b - a
        return gradient

    return hook
