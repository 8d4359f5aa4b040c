"""What a home's own forward reads about its heads becomes this rank's: attributes, configuration, whole arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lindos.comm.world import World
from lindos.core.layout import Pieces
from lindos.core.rules import Home
from lindos.parallel.tensor.heads import KEY_VALUE, QUERY, RATIO, WIDTH, Heads
from lindos.parallel.tensor.roles import AXIS


def localise(
    model: nn.Module, heads: Mapping[str, Heads], homes: Mapping[str, Home], sizes: Mapping[str, int], world: World
) -> None:
    """Set head counts, the kv ratio and widths of every cut home to this rank's.

    Args:
        heads: by home.
        homes: what the rules say about a home; others are read by a closed list of names.
        sizes: whole width of each home's query heads, as its row takes them in.
    """
    modules, rank = dict(model.named_modules()), world.mesh.coordinate(AXIS)
    for name, its in heads.items():
        home, module = homes.get(name), modules[name]
        for attribute, what in home.local if home else _default(module, its, sizes.get(name, 0)):
            _set(module, attribute, what, its, rank)
        if home and home.arguments:
            _slice_arguments(module, home, its, world)


def _default(module: nn.Module, its: Heads, size: int) -> list[tuple[str, str]]:
    """Attributes by a closed list of names, where their values are the whole's."""
    found = [(name, "query") for name in QUERY if getattr(module, name, None) == its.query]
    found += [(name, "key_value") for name in KEY_VALUE if getattr(module, name, None) == its.key_value]
    found += [(name, "query") for name in WIDTH if size and getattr(module, name, None) == size]
    return found + [(name, "ratio") for name in RATIO if hasattr(module, name)]


def _set(module: nn.Module, attribute: str, what: str, its: Heads, rank: int) -> None:
    path, _, last = attribute.rpartition(".")
    if path == "config":
        if not isinstance(module.config, _LocalConfig):
            module.config = _LocalConfig(module.config)
        module.config._local[last] = _scaled(getattr(module.config._whole, last), what, its, rank)
    elif what.startswith("="):
        setattr(module, attribute, module.get_submodule(what[1:]).out_channels)
    else:
        setattr(module, attribute, _scaled(getattr(module, attribute), what, its, rank))


def _scaled(value: Any, what: str, its: Heads, rank: int) -> int:
    if what == "ratio":
        return its.local_ratio(rank)
    whole = its.query if what == "query" else its.key_value
    return value // whole * its.counts(what)[rank]


class _LocalConfig:
    """A configuration in which some numbers are this rank's; everything else is the model's own, live."""

    def __init__(self, whole: Any) -> None:
        self._whole, self._local = whole, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._local[name] if name in self._local else getattr(self._whole, name)


class _Take(torch.autograd.Function):
    """The lines of this rank's heads along a dim; the gradients of all ranks' lines are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, dim: int, world: World, name: str) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.dim, ctx.world, ctx.name, ctx.shape = dim, world, name, x.shape
        return x.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        dx = dy.new_zeros(ctx.shape).index_add_(ctx.dim, index, dy)
        return ctx.world.all_reduce(dx, AXIS, ctx.name, fresh=True), None, None, None, None


def take(x: torch.Tensor, dim: int, heads: int, pieces: Pieces, world: World, name: str) -> torch.Tensor:
    """This rank's heads of a tensor that has all of them along `dim`, alone or under the batch.

    Communicates: all_reduce of the whole gradient over tp in backward, where it has one.
    """
    if x.shape[dim] % heads or x.shape[dim] == 1:
        return x
    dim %= x.dim()
    spread = x.unflatten(dim, (-1, heads))
    index = torch.cat([torch.arange(a, b) for a, b in pieces[world.mesh.coordinate(AXIS)]]).to(x.device)
    return _Take.apply(spread, index, dim + 1, world, name).flatten(dim, dim + 1)


def _slice_arguments(module: nn.Module, home: Home, its: Heads, world: World) -> None:
    import inspect

    own = module.__dict__.get("forward") or functools.partial(type(module).forward, module)
    names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]

    def forward(*inputs: Any, **options: Any) -> Any:
        given = {**dict(zip(names, inputs)), **options}
        for name, dim, kind in home.arguments:
            if isinstance(given.get(name), torch.Tensor):
                heads = its.query if kind == "query" else its.key_value
                given[name] = take(given[name], dim, heads, its.pieces(kind, heads), world, f"{name} of heads")
        return own(**given)

    module.forward = forward  # type: ignore[method-assign]
