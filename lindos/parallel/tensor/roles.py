"""Roles: how the parameters of each module are cut. Writes the ledger's columns; touches no tensor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lindos.core.errors import LayoutError, RefusedError
from lindos.core.layout import Cut, Layout, by_units
from lindos.core.ledger import Entry, Ledger
from lindos.core.mesh import Mesh
from lindos.core.rules import Rule
from lindos.parallel.tensor.heads import Heads, home_of, inner_pieces, input_dim, near_even, output_dim
from lindos.parallel.tensor.tables import Table

AXIS = "tp"
ON_INNER = ("head_norm", "activation_parameter")  # whole, but they see cut features
FEATURES = ("convolution", "wide_norm", "group_norm", "head_parameter")  # cut with the features that they belong to


@dataclass(frozen=True)
class Partial:
    """Lines of a fused parameter that neighbours share: their gradient is summed over the neighbours.

    Attributes:
        dim: that the lines lie along.
        spans: of the local tensor.
        axis: the neighbours.
    """

    dim: int
    spans: tuple[tuple[int, int], ...]
    axis: str


def write(ledger: Ledger, mesh: Mesh, rules: dict[str, Rule], heads: dict[str, Heads], model: nn.Module, table: Table):
    """Write `role`, `in_use`, `at_rest` and `sum_over` of every parameter for its rule.

    Returns:
        The mesh with the sub-axes of shared kv heads, and the partial lines of fused parameters by name.
    """
    parts, partial = mesh.size(AXIS), dict[str, Partial]()
    for its in heads.values():
        if its.sharing > 1 and not any(axis.name == its.shared_axis for axis in mesh.axes):
            mesh = mesh.split(AXIS, **{its.held_axis: its.key_value, its.shared_axis: its.sharing})
    modules = dict(model.named_modules())
    for name, rule in rules.items():
        its = heads.get(home_of(name, rule)) if rule.heads else None
        module, suffixes = modules.get(name), [""]
        if module is not None:
            suffixes = [suffix for suffix, _ in module.named_parameters(recurse=False)]
        for suffix in suffixes:
            full = f"{name}.{suffix}" if suffix else name
            entry = _entry(ledger, full)
            owner = module if module is not None else modules[name.rpartition(".")[0]]
            cut = _cut(rule, owner, suffix or name.rpartition(".")[2], entry.shape, parts, its)
            layout = Layout(entry.shape, (cut,) if cut else ())
            if full != entry.name and entry.role != "whole":
                _check_tied(entry, full, rule, layout)
                continue
            entry.role, entry.in_use, entry.at_rest = rule.role, layout, layout
            shared = its if cut and its and its.sharing > 1 else None
            kinds = rule.kinds(rule.count)
            if rule.role in ON_INNER or (rule.role == "experts" and suffix.endswith("down_proj_bias")):
                entry.sum_over = table.partial_on_inner()
            elif shared and set(kinds) == {"key_value"} and rule.role not in ("row", "split_row", "whole_output"):
                entry.sum_over = (shared.shared_axis,)
            elif shared and "key_value" in kinds:
                partial[entry.name] = _partial(rule, cut, shared, mesh)
    return mesh, partial


def _entry(ledger: Ledger, name: str) -> Entry:
    buffer = ledger.entries.get(("buffer", name))
    return buffer if buffer is not None else ledger.parameter(name)


def _partial(rule: Rule, cut: Cut | None, heads: Heads, mesh: Mesh) -> Partial:
    assert cut is not None
    assert cut.pieces is not None
    assert cut.dim != "flat"
    spans, at = [], 0
    for kind, (a, b) in zip(rule.kinds(rule.count), cut.pieces[mesh.coordinate(AXIS, mesh.rank or 0)]):
        if kind == "key_value":
            spans.append((at, at + b - a))
        at += b - a
    return Partial(cut.dim, tuple(spans), heads.shared_axis)


def _cut(
    rule: Rule, module: nn.Module, suffix: str, shape: tuple[int, ...], parts: int, heads: Heads | None
) -> Cut | None:
    """The cut of one parameter."""
    role, bias = rule.role, suffix == "bias"
    if role in ("column", "gathered_column", "inner_column"):
        dim = 0 if bias and len(shape) == 1 else output_dim(module)
        return Cut(AXIS, dim, parts, inner_pieces(shape[dim], parts, rule, heads))
    if role in ("row", "split_row", "whole_output") and not bias:
        dim = input_dim(module)
        return Cut(AXIS, dim, parts, inner_pieces(shape[dim], parts, rule, heads))
    if role in ("vocabulary_embedding", "vocabulary_head"):
        return Cut(AXIS, 0, parts)
    if role in FEATURES:
        dim = rule.dim if role == "head_parameter" else 0
        return Cut(AXIS, dim, parts, inner_pieces(shape[dim], parts, rule, heads))
    if role == "head_table":
        return Cut(AXIS, 1, parts, inner_pieces(shape[1], parts, rule, heads))
    if role == "experts":
        return _experts_cut(module, suffix, shape, parts)
    return None


def _experts_cut(module: nn.Module, suffix: str, shape: tuple[int, ...], parts: int) -> Cut | None:
    """Fused experts: gate_up [E, 2F, D] in two blocks along F (or in pairs), up [E, F, D], down [E, D, F].

    `is_transposed` means [E, D, 2F] and [E, F, D]; `is_concatenated` False means that gate and up alternate.
    """
    turned = bool(getattr(module, "is_transposed", False)) or _turned(module)
    if suffix in ("gate_up_proj", "up_proj", "gate_proj", "gate_up_proj_bias", "up_proj_bias") and len(shape) in (2, 3):
        dim = len(shape) - 1 if turned or len(shape) == 2 else 1
        fused = suffix.startswith("gate_up")
        if fused and not getattr(module, "is_concatenated", True):
            return Cut(AXIS, dim, parts, by_units(near_even(shape[dim] // 2, parts), 2))
        return Cut(AXIS, dim, parts, inner_pieces(shape[dim], parts, Rule("", "experts", blocks=1 + fused), None))
    if suffix == "down_proj" and len(shape) == 3:
        dim = 1 if turned else 2
        return Cut(AXIS, dim, parts, inner_pieces(shape[dim], parts, Rule("", "experts"), None))
    if suffix == "down_proj_bias" and len(shape) == 2:
        return None  # added once: each rank adds its share of it
    raise RefusedError(f"experts have gate_up_proj [E, 2F, D] and down_proj [E, D, F]; got {suffix} {list(shape)}.")


def _turned(module: nn.Module) -> bool:
    """Whether down_proj is [E, F, D]: its middle size is half of gate_up's last."""
    up, down = module._parameters.get("gate_up_proj"), module._parameters.get("down_proj")
    if up is None or down is None or hasattr(module, "is_transposed"):
        return False
    return up.shape[2] == 2 * down.shape[1] and up.shape[1] == down.shape[2] != up.shape[2]


def _check_tied(entry: Entry, name: str, rule: Rule, layout: Layout) -> None:
    if entry.in_use != layout:
        raise LayoutError(f"{name} is tied to {entry.name} but its role {rule.role!r} cuts it otherwise.")
