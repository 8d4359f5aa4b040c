"""What each role's module does, as an instance `forward` around the class's own. No forward is copied or edited.

column                 x -> copy(x) -> own forward -> local features
row                    local features -> own matmul -> sum over tp -> + bias
gathered_column        column, then all features joined again
split_row              own part of the features, then row
vocabulary_embedding   ids that live here -> own forward; others give zeros -> sum over tp
vocabulary_head        column; in a call without labels the whole vocabulary is joined
experts                copy of the states and of the routing weights -> own forward -> sum over tp
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lindos.comm.world import World
from lindos.core.errors import RefusedError
from lindos.core.rules import Rule
from lindos.parallel import products
from lindos.parallel.tensor import ops
from lindos.parallel.tensor.roles import AXIS, Heads, inner_pieces, near_even, output_dim

Forward = Callable[..., Any]


class Crossing:
    """What the forwards of one model share: the world, the shared copies, and whether logits stay local."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.shared = ops.Shared(world, AXIS)
        self.local_logits = False
        self.on_inner = False  # the last border crossed led into P: dropout then sees local features
        self.place = (0, 0)  # this rank's first feature and first head of P, as the last column left them

    def enter(self, x: torch.Tensor, name: str, place: tuple[int, int] = (0, 0)) -> torch.Tensor:
        self.on_inner, self.place = True, place
        return self.shared.enter(x, name)

    def leave(self, x: torch.Tensor, name: str) -> torch.Tensor:
        self.on_inner = False
        return ops.total(x, self.world, AXIS, name)


def install(model: nn.Module, rules: dict[str, Rule], crossing: Crossing, heads: dict[str, Heads]) -> None:
    """Give every module with a rule its role's forward."""
    made = {
        "column": _column,
        "row": _row,
        "gathered_column": _gathered_column,
        "split_row": _split_row,
        "vocabulary_embedding": _vocabulary_embedding,
        "vocabulary_head": _vocabulary_head,
        "experts": _experts,
    }
    modules = dict(model.named_modules())
    for name, rule in rules.items():
        if rule.role in made:
            module = modules[name]
            make = made[rule.role]
            module.forward = make(module, name, rule, crossing, heads.get(name))  # type: ignore[method-assign]


def _own(module: nn.Module) -> Forward:
    """The class's forward, bound: what the module would do by itself."""
    if type(module).forward is nn.Linear.forward:
        return functools.partial(products.linear_forward, module)
    return functools.partial(type(module).forward, module)


def _column(module: nn.Module, name: str, rule: Rule, crossing: Crossing, heads: Heads | None) -> Forward:
    own = _own(module)
    if hasattr(module, "nf"):
        parts, rank = crossing.world.mesh.size(AXIS), crossing.world.mesh.coordinate(AXIS)
        blocks = rule.blocks if isinstance(rule.blocks, tuple) else (module.nf // rule.blocks,) * rule.blocks
        pieces = inner_pieces(module.nf, parts, blocks, heads, rule.heads)
        module.nf = sum(b - a for a, b in pieces[rank])  # Conv1D shapes its output by it
    place = _place(module, rule, crossing, heads)

    def forward(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        return own(crossing.enter(x, name, place), *rest, **options)

    return forward


def _place(module: nn.Module, rule: Rule, crossing: Crossing, heads: Heads | None) -> tuple[int, int]:
    """First feature and first query head of this rank behind a column."""
    parts, rank = crossing.world.mesh.size(AXIS), crossing.world.mesh.coordinate(AXIS)
    if heads:
        first = sum(heads.counts()[:rank])
        return first * heads.size, first
    blocks = len(rule.blocks) if isinstance(rule.blocks, tuple) else rule.blocks
    width = module.weight.shape[output_dim(module)] // blocks  # type: ignore[union-attr,index]
    return sum(near_even(width, parts)[:rank]), 0


def _matmul(module: nn.Module, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    kind = type(module)
    if kind.forward is nn.Linear.forward:
        return lambda x: products.linear(x, module.weight)  # type: ignore[arg-type]
    if output_dim(module) == 1:
        return lambda x: x @ module.weight  # type: ignore[operator]
    raise RefusedError(
        f"{name} has role row but is a {kind.__name__} with a forward of its own: a row is a Linear or Conv1D."
    )


def _row(module: nn.Module, name: str, rule: Rule, crossing: Crossing, heads: Heads | None) -> Forward:
    matmul = _matmul(module, name)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = crossing.leave(matmul(x), name)
        return y if module.bias is None else y + module.bias  # type: ignore[operator]

    return forward


def _gathered_column(module: nn.Module, name: str, rule: Rule, crossing: Crossing, heads: Heads | None) -> Forward:
    column = _column(module, name, rule, crossing, heads)
    width = module.weight.shape[output_dim(module)]  # type: ignore[union-attr,index]
    counts = _widths(width, crossing, heads, rule)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = _gather_uneven(column(x), counts, crossing.world, name)
        crossing.on_inner = False
        return y

    return forward


def _split_row(module: nn.Module, name: str, rule: Rule, crossing: Crossing, heads: Heads | None) -> Forward:
    row = _row(module, name, rule, crossing, heads)
    width = module.weight.shape[1 - output_dim(module)]  # type: ignore[union-attr,index]
    counts = _widths(width, crossing, heads, rule)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return row(_split_uneven(x, counts, crossing.world, name))

    return forward


def _widths(width: int, crossing: Crossing, heads: Heads | None, rule: Rule) -> tuple[int, ...]:
    parts = crossing.world.mesh.size(AXIS)
    if heads and rule.heads:
        return tuple(sum(b - a for a, b in piece) for piece in heads.pieces(rule.heads))
    return near_even(width, parts)


def _gather_uneven(x: torch.Tensor, counts: tuple[int, ...], world: World, name: str) -> torch.Tensor:
    """Join parts of these widths along the last dim; collectives carry the widest, the rest is dropped."""
    widest = max(counts)
    joined = ops.gather(F.pad(x, (0, widest - x.shape[-1])), world, AXIS, -1, name)
    if len(set(counts)) == 1:
        return joined
    return torch.cat([part[..., :n] for part, n in zip(joined.split(widest, -1), counts)], -1)


def _split_uneven(x: torch.Tensor, counts: tuple[int, ...], world: World, name: str) -> torch.Tensor:
    if len(set(counts)) > 1:
        x = torch.cat([F.pad(part, (0, max(counts) - part.shape[-1])) for part in x.split(counts, -1)], -1)
    return ops.split(x, world, AXIS, -1, name)[..., : counts[world.mesh.coordinate(AXIS)]]


def _vocabulary_embedding(module: nn.Module, name: str, rule: Rule, crossing: Crossing, heads: Heads | None) -> Forward:
    if getattr(module, "max_norm", None) is not None:
        raise RefusedError(f"{name} renormalises its rows in forward (max_norm), which a cut vocabulary cannot do.")
    own, world = _own(module), crossing.world
    rows = -(-module.weight.shape[0] // world.mesh.size(AXIS))  # type: ignore[union-attr,index]
    start = rows * world.mesh.coordinate(AXIS)
    padding = getattr(module, "padding_idx", None)
    if padding is not None:
        module.padding_idx = padding - start if start <= padding < start + rows else None  # type: ignore[assignment]

    def forward(ids: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        foreign = (ids < start) | (ids >= start + rows)
        local = own((ids - start).masked_fill(foreign, 0), *rest, **options)
        # Whatever the class does after its lookup (gemma scales) is done to zeros of foreign ids, then summed once.
        return crossing.leave(local.masked_fill(foreign.unsqueeze(-1), 0), name)

    return forward


def _vocabulary_head(module: nn.Module, name: str, rule: Rule, crossing: Crossing, heads: Heads | None) -> Forward:
    own, world = _own(module), crossing.world
    vocabulary = module.weight.shape[0]  # type: ignore[union-attr,index]

    def forward(x: torch.Tensor) -> torch.Tensor:
        logits = own(crossing.enter(x, name))
        crossing.on_inner = False
        if crossing.local_logits:
            return logits
        return ops.gather(logits, world, AXIS, -1, f"{name} whole")[..., :vocabulary]

    return forward


def _experts(module: nn.Module, name: str, rule: Rule, crossing: Crossing, heads: Heads | None) -> Forward:
    own, world = _own(module), crossing.world

    def forward(states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, **options: Any) -> torch.Tensor:
        y = own(crossing.enter(states, name), indices, ops.copy(weights, world, AXIS, f"{name} weights"), **options)
        return crossing.leave(y, name)

    return forward
