"""Roles: how the parameters of each module are cut. Writes the ledger's columns; touches no tensor.

Heads are one object: q, k, v, the input of o and whatever belongs to a head are cut at the same heads. With at least as
many kv heads as ranks the unit is a kv group; with fewer, neighbours share a kv head, and the gradient of its weights
is summed over exactly those neighbours (over all of tp it would be wrong, with an equal loss).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lindos.core.errors import LayoutError, RefusedError
from lindos.core.layout import Cut, Layout, Pieces, by_units, shared
from lindos.core.ledger import Ledger
from lindos.core.mesh import Mesh
from lindos.core.rules import Rule
from lindos.parallel.tensor.tables import Table

AXIS = "tp"


@dataclass(frozen=True)
class Heads:
    """Attention heads of one module over tp.

    Attributes:
        size: elements of a head.
        query: query heads in all.
        key_value: key and value heads in all.
        parts: tp.
    """

    size: int
    query: int
    key_value: int
    parts: int

    def __post_init__(self) -> None:
        q, kv, n = self.query, self.key_value, self.parts
        if q % kv:
            raise LayoutError(f"{q} query heads must be a multiple of {kv} kv heads.")
        if q < n or (kv < n and (n % kv or q % n)):
            fits = [t for t in range(1, q + 1) if (kv >= t or (t % kv == 0 and q % t == 0))]
            raise LayoutError(f"tp={n} cannot cut {q} query heads over {kv} kv heads. Use tp in {fits}.")

    @property
    def sharing(self) -> int:
        """Ranks that hold the same kv head."""
        return max(1, self.parts // self.key_value) if self.key_value < self.parts else 1

    def counts(self) -> tuple[int, ...]:
        """Query heads of each rank."""
        if self.sharing > 1:
            return (self.query // self.parts,) * self.parts
        group = self.query // self.key_value
        return tuple(group * count for count in near_even(self.key_value, self.parts))

    def pieces(self, kind: str) -> Pieces:
        """Intervals of each rank among the rows of "query" or "key_value" projections."""
        if kind == "query":
            return by_units(self.counts(), self.size)
        if self.sharing > 1:
            return shared(self.key_value, self.size, self.parts)
        return by_units(near_even(self.key_value, self.parts), self.size)

    def local_ratio(self, rank: int) -> int:
        """Query heads to a kv head on a rank."""
        kv = 1 if self.sharing > 1 else near_even(self.key_value, self.parts)[rank]
        return self.counts()[rank] // kv


def near_even(count: int, parts: int) -> tuple[int, ...]:
    """`near_even(9, 2) == (5, 4)`."""
    return tuple(count // parts + (i < count % parts) for i in range(parts))


def heads_of(attention: nn.Module, parts: int, weights: dict[str, tuple[int, ...]]) -> Heads:
    """Heads of an attention module, from its head size and the shapes of its projections, never from a config.

    Args:
        attention: the module that owns the projections.
        weights: output sizes of its projections by kind: "query" and "key_value".
    """
    size = next((int(v) for name in ("head_dim", "attention_head_size") if (v := getattr(attention, name, 0))), 0)
    if not size:
        raise RefusedError(f"{type(attention).__name__} tells no head size (head_dim), so its heads cannot be cut.")
    query = weights["query"][0] // size
    key_value = weights["key_value"][0] // size if "key_value" in weights else query
    return Heads(size, query, key_value, parts)


def output_dim(module: nn.Module) -> int:
    """Dim of the outputs in a module's weight: 0, or 1 where weights are [in, out] as in transformers' Conv1D."""
    return 1 if type(module).__name__ == "Conv1D" else 0


def write(ledger: Ledger, mesh: Mesh, rules: dict[str, Rule], model: nn.Module, table: Table) -> Mesh:
    """Write `role`, `in_use`, `at_rest` and `sum_over` of every parameter for its module's rule."""
    parts = mesh.size(AXIS)
    modules = dict(model.named_modules())
    for name, rule in rules.items():
        module = modules[name]
        heads = attention_heads(name, rule, rules, modules, parts) if rule.heads else None
        if heads and heads.sharing > 1:
            mesh = mesh.split(AXIS, **{f"kv{heads.key_value}": heads.key_value, shared_axis(heads): heads.sharing})
        for suffix, _ in module.named_parameters(recurse=False):
            full = f"{name}.{suffix}"
            entry = ledger.parameter(full)
            cut, sums = _cut(rule, module, suffix, entry.shape, parts, heads)
            if full != entry.name and entry.role != "whole":
                _check_tied(entry, full, rule, Layout(entry.shape, (cut,) if cut else ()))
                continue
            entry.role = rule.role
            entry.in_use = entry.at_rest = Layout(entry.shape, (cut,) if cut else ())
            entry.sum_over = table.partial_on_inner() if rule.role == "head_norm" else sums
    return mesh


def shared_axis(heads: Heads) -> str:
    """Name of the sub-axis over which neighbours hold the same kv head."""
    return f"kv{heads.key_value}_shared"


def attention_heads(name: str, rule: Rule, rules: dict[str, Rule], modules: dict[str, nn.Module], parts: int) -> Heads:
    """Heads of the attention that a projection belongs to; all its projections give the same answer."""
    home = name.rpartition(".")[0]
    outputs: dict[str, tuple[int, ...]] = {}
    for other, its in rules.items():
        if other.rpartition(".")[0] == home and its.heads and its.role in ("column", "gathered_column"):
            weight = modules[other].get_parameter("weight")
            size = weight.shape[output_dim(modules[other])]
            outputs[its.heads] = (size // len(blocks_of(its, size)),)
    return heads_of(modules[home], parts, outputs)


def blocks_of(rule: Rule, size: int) -> tuple[int, ...]:
    """Sizes of the fused blocks along a dim of `size`."""
    if isinstance(rule.blocks, tuple):
        if sum(rule.blocks) != size:
            raise LayoutError(f"rule {rule.pattern!r}: blocks {rule.blocks} must add up to {size}.")
        return rule.blocks
    if size % rule.blocks:
        raise LayoutError(f"rule {rule.pattern!r}: {rule.blocks} fused blocks must divide {size}.")
    return (size // rule.blocks,) * rule.blocks


def inner_pieces(size: int, parts: int, blocks: tuple[int, ...], heads: Heads | None, kind: str | None) -> Pieces:
    """Intervals of P's features that each rank holds, block by block."""
    per_block = []
    for block in blocks:
        per_block.append(heads.pieces(kind) if heads and kind else by_units(near_even(block, parts), 1))
        if block < parts:
            raise LayoutError(f"tp={parts} cannot cut {block} features. Use tp of at most {block}.")
    starts = [sum(blocks[:i]) for i in range(len(blocks))]
    return tuple(
        tuple((start + a, start + b) for start, pieces in zip(starts, per_block) for a, b in pieces[c])
        for c in range(parts)
    )


def _cut(
    rule: Rule, module: nn.Module, suffix: str, shape: tuple[int, ...], parts: int, heads: Heads | None
) -> tuple[Cut | None, tuple[str, ...]]:
    """The cut of one parameter, and over which axes its gradient is a part of a sum."""
    out = output_dim(module)
    sums = (shared_axis(heads),) if heads and heads.sharing > 1 and rule.heads == "key_value" else ()
    if rule.role in ("column", "gathered_column"):
        dim = 0 if suffix == "bias" else out
        return Cut(
            AXIS, dim, parts, inner_pieces(shape[dim], parts, blocks_of(rule, shape[dim]), heads, rule.heads)
        ), sums
    if rule.role in ("row", "split_row") and suffix != "bias":
        dim = 1 - out
        return Cut(AXIS, dim, parts, inner_pieces(shape[dim], parts, (shape[dim],), heads, rule.heads)), ()
    if rule.role in ("vocabulary_embedding", "vocabulary_head"):
        return Cut(AXIS, 0, parts), ()
    if rule.role == "experts":
        return _experts_cut(suffix, shape, parts), ()
    return None, ()


def _experts_cut(suffix: str, shape: tuple[int, ...], parts: int) -> Cut:
    """Fused experts: gate_up_proj [E, 2F, D] in two blocks along F, down_proj [E, D, F] along F."""
    if suffix == "gate_up_proj" and len(shape) == 3 and shape[1] % 2 == 0:
        return Cut(AXIS, 1, parts, inner_pieces(shape[1], parts, (shape[1] // 2,) * 2, None, None))
    if suffix == "down_proj" and len(shape) == 3:
        return Cut(AXIS, 2, parts, inner_pieces(shape[2], parts, (shape[2],), None, None))
    raise RefusedError(f"experts have gate_up_proj [E, 2F, D] and down_proj [E, D, F]; got {suffix} {list(shape)}.")


def _check_tied(entry: object, name: str, rule: Rule, layout: Layout) -> None:
    if entry.in_use != layout:  # type: ignore[attr-defined]
        raise LayoutError(f"{name} is tied to {entry.name} but its role {rule.role!r} cuts it otherwise.")  # type: ignore[attr-defined]
