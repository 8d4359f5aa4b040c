"""Heads over tp: the one object that cuts q, k, v, the input of o and whatever belongs to a head at the same heads.

With at least as many kv heads as ranks the unit is a kv group; with fewer, neighbours share a kv head, and the gradient
of its weights is summed over exactly those neighbours (over all of tp it would be wrong, with an equal loss). Groups of
a state-space mixer are kv heads to its heads, and its channels are heads of one element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lindos.core.errors import LayoutError, RefusedError
from lindos.core.layout import Pieces, by_units
from lindos.core.rules import Home, Rule

HEAD_SIZE = ("head_dim", "attention_head_size", "head_size", "dim_head", "key_value_proj_dim")
QUERY = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads")
KEY_VALUE = ("num_key_value_heads", "num_kv_heads", "kv_heads")
RATIO = ("num_key_value_groups", "num_queries_per_kv")
WIDTH = ("split_size", "embed_dim", "all_head_size", "hidden_size", "inner_dim", "attention_hidden_size")

TURNED = ("Conv1D", "AriaGroupedExpertsGemm")  # classes whose weight is [in, out], or [experts, in, out]


@dataclass(frozen=True)
class Heads:
    """Heads of one module over tp.

    Attributes:
        query: query heads in all.
        key_value: key and value heads in all.
        parts: tp.
    """

    query: int
    key_value: int
    parts: int

    def __post_init__(self) -> None:
        q, kv, n = self.query, self.key_value, self.parts
        if kv < 1 or q % kv:
            raise LayoutError(f"{q} query heads must be a multiple of {kv} kv heads.")
        if not _fits(q, kv, n):
            fits = [t for t in range(1, min(q, 1024) + 1) if _fits(q, kv, t)]
            raise LayoutError(f"tp={n} cannot cut {q} query heads over {kv} kv heads. Use tp in {fits}.")

    @property
    def sharing(self) -> int:
        """Ranks that hold the same kv head."""
        return self.parts // self.key_value if self.key_value < self.parts else 1

    @property
    def fit(self) -> str:
        """How tp meets the heads: "even", "uneven" or "shared", or both of the last."""
        uneven = any(len(set(self.counts(kind))) > 1 for kind in ("query", "key_value"))
        words = ["shared"] * (self.sharing > 1) + ["uneven"] * uneven
        return " ".join(words) or "even"

    @property
    def shared_axis(self) -> str:
        """Name of the sub-axis over which neighbours hold the same kv head."""
        return f"kv{self.key_value}_shared"

    @property
    def held_axis(self) -> str:
        """Name of the sub-axis whose ranks hold different kv heads."""
        return f"kv{self.key_value}" if self.sharing > 1 else "tp"

    def counts(self, kind: str = "query") -> tuple[int, ...]:
        """Heads of each rank."""
        if self.sharing > 1:
            each = near_even(self.query // self.key_value, self.sharing) if kind == "query" else (1,) * self.sharing
            return each * self.key_value
        groups = near_even(self.key_value, self.parts)
        ratio = self.query // self.key_value if kind == "query" else 1
        return tuple(ratio * count for count in groups)

    def starts(self, kind: str = "query") -> tuple[int, ...]:
        """First head of each rank."""
        if self.sharing > 1 and kind == "key_value":
            return tuple(rank // self.sharing for rank in range(self.parts))
        counts = self.counts(kind)
        return tuple(sum(counts[:rank]) for rank in range(self.parts))

    def pieces(self, kind: str, size: int) -> Pieces:
        """Intervals of each rank along a dim of `size` elements that belong to all heads of a kind, in order.

        Raises:
            LayoutError: the heads do not divide it.
        """
        heads = self.query if kind == "query" else self.key_value
        if size % heads:
            raise LayoutError(f"{heads} {kind} heads do not divide a dim of {size}.")
        unit = size // heads
        return tuple(((a * unit, (a + n) * unit),) for a, n in zip(self.starts(kind), self.counts(kind)))

    def local_ratio(self, rank: int) -> int:
        """Query heads to a kv head on a rank."""
        return self.counts()[rank] // self.counts("key_value")[rank]


def _fits(query: int, key_value: int, parts: int) -> bool:
    return query >= parts and (key_value >= parts or parts % key_value == 0)


def near_even(count: int, parts: int) -> tuple[int, ...]:
    """`near_even(9, 2) == (5, 4)`."""
    return tuple(count // parts + (i < count % parts) for i in range(parts))


def home_of(name: str, rule: Rule) -> str:
    """Name of the module that owns the heads of a match."""
    return rule.home or name.rpartition(".")[0]


def all_heads(
    resolved: Mapping[str, Rule], homes: Mapping[str, Home], modules: Mapping[str, nn.Module], parts: int
) -> dict[str, Heads]:
    """Heads by the name of their home, for every rule that speaks of heads.

    Raises:
        LayoutError: tp cannot cut them.
        RefusedError: a home tells neither head size nor number of heads.
    """
    found = {name: Heads(home.query, home.key_value, parts) for name, home in homes.items()}
    for name, rule in resolved.items():
        home = home_of(name, rule)
        if rule.heads and home not in found:
            said = _told(home, resolved, modules)
            found[home] = Heads(said.query, said.key_value, parts)
    return found


def _told(home: str, resolved: Mapping[str, Rule], modules: Mapping[str, nn.Module]) -> Home:
    """Heads of a module from its head size and the shapes of its projections; from its attributes only without."""
    module = modules[home]
    outputs: dict[str, int] = {}
    for name, rule in resolved.items():
        if rule.heads and home_of(name, rule) == home and rule.role in ("column", "gathered_column", "inner_column"):
            weight = modules[name].get_parameter("weight")
            size = weight.shape[output_dim(modules[name])]
            for kind, block in zip(rule.kinds(rule.count), blocks_of(rule, size)):
                outputs[str(kind)] = block
    size = next((int(v) for name in HEAD_SIZE if (v := getattr(module, name, 0))), 0)
    if size and "query" in outputs:
        return Home(outputs["query"] // size, outputs.get("key_value", outputs["query"]) // size)
    query = next((int(v) for name in QUERY if (v := getattr(module, name, 0))), 0)
    if not query:
        raise RefusedError(
            f"{home} ({type(module).__name__}) tells no head size ({', '.join(HEAD_SIZE)}) and no number of heads "
            f"({', '.join(QUERY)}), so its heads cannot be cut."
        )
    return Home(query, next((int(v) for name in KEY_VALUE if (v := getattr(module, name, 0))), query))


def output_dim(module: nn.Module) -> int:
    """Dim of the outputs in a module's weight: the last but one, [out, in] or [experts, out, in]; last if turned."""
    return _dims(module) - (1 if type(module).__name__ in TURNED else 2)


def input_dim(module: nn.Module) -> int:
    """Dim of the inputs in a module's weight: the other of the last two."""
    return _dims(module) - (2 if type(module).__name__ in TURNED else 1)


def _dims(module: nn.Module) -> int:
    weight = module._parameters.get("weight")
    return 3 if weight is not None and weight.dim() == 3 else 2


def blocks_of(rule: Rule, size: int) -> tuple[int, ...]:
    """Sizes of the fused blocks along a dim of `size`."""
    if isinstance(rule.blocks, tuple):
        if sum(rule.blocks) != size:
            raise LayoutError(f"rule {rule.pattern!r}: blocks {rule.blocks} must add up to {size}.")
        return rule.blocks
    if size % rule.blocks:
        raise LayoutError(f"rule {rule.pattern!r}: {rule.blocks} fused blocks must divide {size}.")
    return (size // rule.blocks,) * rule.blocks


def inner_pieces(size: int, parts: int, rule: Rule, heads: Heads | None) -> Pieces:
    """Intervals of P's features that each rank holds along a dim of `size`, block by block."""
    per_block, start = [], 0
    blocks = blocks_of(rule, size)
    for block, kind in zip(blocks, rule.kinds(len(blocks))):
        if block < parts and not (heads and kind):
            raise LayoutError(f"tp={parts} cannot cut {block} features. Use tp of at most {block}.")
        pieces = heads.pieces(kind, block) if heads and kind else by_units(near_even(block, parts), 1)
        per_block.append([[(start + a, start + b) for a, b in piece] for piece in pieces])
        start += block
    return tuple(tuple(span for pieces in per_block for span in pieces[c]) for c in range(parts))


def width(pieces: Pieces, rank: int) -> int:
    """Elements that a rank holds."""
    return sum(b - a for a, b in pieces[rank])
