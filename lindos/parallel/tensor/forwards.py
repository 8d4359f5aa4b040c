"""What each role's module does, as an instance `forward` around the class's own. No forward is copied or edited.

column                 x -> copy(x) -> own forward -> local features
inner_column           own forward on a latent, whose gradient is summed already
row                    local features -> own matmul -> sum over tp -> + bias
whole_output           row, whose output is read by cut math again: its gradient is summed too
gathered_column        column, then all features joined again
split_row              own part of the features, then row
latent                 own forward, its output's gradient summed
vocabulary_embedding   ids that live here -> own forward; others give zeros -> sum over tp
vocabulary_head        column; in a call without labels the whole vocabulary is joined
wide_norm, group_norm  own forward, its statistics over the features of all ranks
experts                copy of the states and of the routing weights -> own forward -> sum over tp
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lindos.comm.world import World
from lindos.core.errors import InputError, RefusedError
from lindos.core.layout import Pieces
from lindos.core.rules import Rule
from lindos.parallel import products
from lindos.parallel.tensor import norms, ops
from lindos.parallel.tensor.heads import Heads, home_of, inner_pieces, input_dim, output_dim, width
from lindos.parallel.tensor.roles import AXIS

Forward = Callable[..., Any]


class Crossing:
    """What the forwards of one model share: the world, the shared copies, and whether logits stay local."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.shared = ops.Shared(world, AXIS)
        self.local_logits = False
        self.on_inner = False  # the last border crossed led into P: dropout then sees local features
        self.logits_buffers: list[tuple[nn.Module, str]] = []  # added to logits by the model, one number a token
        self.place = (0, 0)  # this rank's first feature and first head of P, as the last column left them

    def enter(self, x: torch.Tensor, name: str, place: tuple[int, int] = (0, 0)) -> torch.Tensor:
        self.on_inner, self.place = True, place
        return self.shared.enter(x, name)

    def leave(self, x: torch.Tensor, name: str) -> torch.Tensor:
        self.on_inner = False
        return ops.total(x, self.world, AXIS, name)


@dataclass(frozen=True)
class Site:
    """One module with a role, while its parameters are still whole."""

    module: nn.Module
    name: str
    rule: Rule
    crossing: Crossing
    heads: Heads | None

    @property
    def parts(self) -> int:
        return self.crossing.world.mesh.size(AXIS)

    @property
    def rank(self) -> int:
        return self.crossing.world.mesh.coordinate(AXIS)

    def pieces(self, size: int) -> Pieces:
        """Intervals of each rank along a whole dim of `size`."""
        return inner_pieces(size, self.parts, self.rule, self.heads)

    def widths(self, size: int) -> tuple[int, ...]:
        """Features of each rank of a whole dim of `size`."""
        pieces = self.pieces(size)
        return tuple(width(pieces, rank) for rank in range(self.parts))

    def size(self, dim: int) -> int:
        return self.module.weight.shape[dim]  # type: ignore[union-attr,index,return-value]

    def own(self) -> Forward:
        """The class's forward, bound: what the module would do by itself."""
        if type(self.module).forward is nn.Linear.forward:
            return functools.partial(products.linear_forward, self.module)
        return functools.partial(type(self.module).forward, self.module)


def install(model: nn.Module, rules: Mapping[str, Rule], crossing: Crossing, heads: Mapping[str, Heads]) -> None:
    """Give every module with a rule its role's forward; bare parameters have none."""
    modules = dict(model.named_modules())
    for name, rule in rules.items():
        if rule.role == "vocabulary_head" and name in modules:
            size = modules[name].get_parameter("weight").shape[0]
            crossing.logits_buffers += [
                (model, buffer)
                for buffer, value in model._buffers.items()
                if value is not None and value.shape[-1:] == (size,)
            ]
        if rule.role in MAKERS and name in modules:
            its = heads.get(home_of(name, rule)) if rule.heads else None
            site = Site(modules[name], name, rule, crossing, its)
            modules[name].forward = MAKERS[rule.role](site)  # type: ignore[method-assign]


def _column(site: Site) -> Forward:
    own, crossing, name = _resized(site), site.crossing, site.name
    place = _place(site)

    def forward(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        return own(crossing.enter(x, name, place), *rest, **options)

    return forward


def _inner_column(site: Site) -> Forward:
    own, crossing = _resized(site), site.crossing
    place = _place(site)

    def forward(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        crossing.on_inner, crossing.place = True, place
        return own(x, *rest, **options)

    return forward


def _resized(site: Site) -> Forward:
    """The own forward of a column; Conv1D shapes its output by an attribute."""
    own, module = site.own(), site.module
    if hasattr(module, "nf"):
        module.nf = site.widths(module.nf)[site.rank]  # type: ignore[arg-type,assignment]
    return own


def _place(site: Site) -> tuple[int, int]:
    """First feature and first query head of this rank behind a column."""
    if site.heads:
        first = site.heads.starts()[site.rank]
        size = site.pieces(site.size(output_dim(site.module)))[site.rank][0][0]
        return size, first
    return site.pieces(site.size(output_dim(site.module)))[site.rank][0][0], 0


def _row(site: Site) -> Forward:
    matmul, crossing, name, module = _matmul(site), site.crossing, site.name, site.module

    def forward(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        y = crossing.leave(matmul(x, *rest, **options), name)
        return y if module._parameters.get("bias") is None else y + module.bias  # type: ignore[operator]

    return forward


def _matmul(site: Site) -> Forward:
    """The module's product without its bias."""
    module = site.module
    if type(module).forward is nn.Linear.forward:
        return lambda x: products.linear(x, module.weight)  # type: ignore[arg-type]
    own = site.own()
    if module._parameters.get("bias") is None:
        return own

    def without_bias(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        with instead(module, bias=torch.zeros_like(module.bias)):  # type: ignore[arg-type]
            return own(x, *rest, **options)

    return without_bias


class instead:
    """A module's own forward reads other tensors than its parameters, for one call."""

    def __init__(self, module: nn.Module, **tensors: torch.Tensor) -> None:
        self.module, self.tensors = module, tensors

    def __enter__(self) -> None:
        self.module.__dict__.update(self.tensors)  # found before nn.Module looks among its parameters

    def __exit__(self, *_: Any) -> None:
        for name in self.tensors:
            self.module.__dict__.pop(name, None)


def _whole_output(site: Site) -> Forward:
    row, world, name, crossing = _row(site), site.crossing.world, site.name, site.crossing

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = ops.copy(row(x), world, AXIS, f"{name} output")
        crossing.on_inner = True
        return y

    return forward


def _latent(site: Site) -> Forward:
    own, world, name = site.own(), site.crossing.world, site.name

    def forward(*inputs: Any, **options: Any) -> Any:
        return ops.copy(own(*inputs, **options), world, AXIS, f"{name} output")

    return forward


def _gathered_column(site: Site) -> Forward:
    column, world, name, crossing = _column(site), site.crossing.world, site.name, site.crossing
    counts = site.widths(site.size(output_dim(site.module)))

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = _gather_uneven(column(x), counts, world, name)
        crossing.on_inner = False
        return y

    return forward


def _split_row(site: Site) -> Forward:
    row, world, name = _row(site), site.crossing.world, site.name
    counts = site.widths(site.size(input_dim(site.module)))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return row(_split_uneven(x, counts, world, name))

    return forward


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


def _vocabulary_embedding(site: Site) -> Forward:
    module, name, crossing = site.module, site.name, site.crossing
    if getattr(module, "max_norm", None) is not None:
        raise RefusedError(f"{name} renormalises its rows in forward (max_norm), which a cut vocabulary cannot do.")
    own = site.own()
    rows = -(-site.size(0) // site.parts)
    start = rows * site.rank
    padding = getattr(module, "padding_idx", None)
    if padding is not None:
        module.padding_idx = padding - start if start <= padding < start + rows else None  # type: ignore[assignment]

    total = site.size(0)

    def forward(ids: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < total:
            raise InputError(f"{name}: ids must be in 0..{total - 1}; got {int(ids.min())}..{int(ids.max())}.")
        foreign = (ids < start) | (ids >= start + rows)
        local = own((ids - start).masked_fill(foreign, 0), *rest, **options)
        # Whatever the class does after its lookup (gemma scales) is done to zeros of foreign ids, then summed once.
        return crossing.leave(local.masked_fill(foreign.unsqueeze(-1), 0), name)

    return forward


def _vocabulary_head(site: Site) -> Forward:
    own, world, crossing, name = site.own(), site.crossing.world, site.crossing, site.name
    vocabulary = site.size(0)
    rows = -(-vocabulary // site.parts)
    start = rows * site.rank

    def forward(x: torch.Tensor) -> torch.Tensor:
        logits = own(crossing.enter(x, name))
        crossing.on_inner = False
        for owner, buffer in crossing.logits_buffers:  # the model adds it to what is returned here
            whole = owner._buffers[buffer]
            assert whole is not None
            if crossing.local_logits:
                part = whole[..., start : start + rows]
                owner.__dict__[buffer] = F.pad(part, (0, rows - part.shape[-1]))
            else:
                owner.__dict__.pop(buffer, None)
        if crossing.local_logits:
            return logits
        return ops.gather(logits, world, AXIS, -1, f"{name} whole")[..., :vocabulary]

    return forward


def _experts(site: Site) -> Forward:
    own, world, module, crossing, name = site.own(), site.crossing.world, site.module, site.crossing, site.name
    once = [suffix for suffix in module._parameters if suffix.endswith("down_proj_bias")]
    for child in module.children():
        if isinstance(child, nn.Identity):  # an expert that returns its input: each rank adds its share
            child.forward = lambda x: x / site.parts  # type: ignore[method-assign]

    def entered(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad
        return ops.copy(value, world, AXIS, f"{name} weights") if floating else value

    def forward(states: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        states = crossing.enter(states, name)
        rest = tuple(entered(value) for value in rest)
        options = {key: entered(value) for key, value in options.items()}
        shares = {suffix: getattr(module, suffix) / site.parts for suffix in once}
        with instead(module, **shares):
            y = own(states, *rest, **options)
        return crossing.leave(y, name)

    return forward


def _convolution(site: Site) -> Forward:
    module = site.module
    local = site.widths(site.size(0))[site.rank]
    for name in ("groups", "in_channels", "out_channels"):
        if getattr(module, name, None) == site.size(0):
            setattr(module, name, local)
    return site.own()


def _wide_norm(site: Site) -> Forward:
    """Over all heads: the axis whose ranks hold different ones."""
    kinds = site.rule.kinds(1)
    axis = site.heads.held_axis if site.heads and kinds == ("key_value",) else AXIS
    _resize_norm(site)
    return norms.spread(site.own(), site.size(0), site.crossing.world, axis, site.name)


def _group_norm(site: Site) -> Forward:
    """Over the features of each kv group: those of this rank, or shared with its neighbours."""
    assert site.heads is not None
    _resize_norm(site)
    own, heads, module = site.own(), site.heads, site.module
    if heads.sharing == 1:
        return own
    if hasattr(module, "group_size"):
        module.group_size = site.widths(site.size(0))[site.rank]
    return norms.spread(own, site.size(0) // heads.key_value, site.crossing.world, heads.shared_axis, site.name)


def _resize_norm(site: Site) -> None:
    module, rank = site.module, site.rank
    if getattr(module, "normalized_shape", None) == (site.size(0),):
        module.normalized_shape = (site.widths(site.size(0))[rank],)  # type: ignore[assignment]
    for name in ("n_groups", "num_heads"):
        if site.heads and getattr(module, name, None) == site.heads.key_value:
            setattr(module, name, site.heads.counts("key_value")[rank])


MAKERS: dict[str, Callable[[Site], Forward]] = {
    "column": _column,
    "inner_column": _inner_column,
    "row": _row,
    "whole_output": _whole_output,
    "latent": _latent,
    "gathered_column": _gathered_column,
    "split_row": _split_row,
    "vocabulary_embedding": _vocabulary_embedding,
    "vocabulary_head": _vocabulary_head,
    "experts": _experts,
    "convolution": _convolution,
    "wide_norm": _wide_norm,
    "group_norm": _group_norm,
}
