"""Initial values by the model's own rule, one unit of the model at a time, each module under a seed of its name.

Every rank makes the same full values of a unit and keeps its slices, so a plan does not change the model that is
trained, and no rank holds more than its shards and one unit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lindos.comm.seeds import seed_of
from lindos.core.errors import RefusedError
from lindos.hf.models import is_transformers


@dataclass
class _Unit:
    """One unit as it was before the plan changed it: on meta, so that the copy costs nothing."""

    name: str
    module: nn.Module
    parameters: list[str]


def initial_values(model: nn.Module, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full fp32 value) of every parameter that is on meta, unit by unit; tied ones once.

    What has no value is noted at the call, the values are made as the iterator is read: the model may be cut in
    between.

    Raises:
        RefusedError: a module has parameters and no rule that initialises them.
    """
    units, done = [], set()
    for name, module in _units(model):
        fresh = [suffix for suffix, p in module.named_parameters() if p.is_meta and id(p) not in done]
        done.update(id(p) for p in module.parameters())
        if fresh:
            units.append(_Unit(name, copy.deepcopy(module), fresh))
    return _values(units, model, seed)


def _values(units: list[_Unit], model: nn.Module, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    submodels = _submodels(model)
    for unit in units:
        with torch.random.fork_rng(devices=[]):
            made = _materialised(unit.module)
            _initialise(made, unit.name, seed, model, submodels)
        values = dict(made.named_parameters())
        for suffix in unit.parameters:
            yield (f"{unit.name}.{suffix}" if unit.name else suffix), values[suffix].detach()


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules to be made whole at once: members of module lists, else the deepest that own parameters themselves."""

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if isinstance(module, nn.ModuleList):
            for i, child in enumerate(module):
                yield f"{name}.{i}", child
        elif any(True for _ in module.parameters(recurse=False)) or not any(True for _ in module.children()):
            yield name, module
        else:
            for suffix, child in module.named_children():
                yield from walk(f"{name}.{suffix}" if name else suffix, child)

    yield from walk("", model)


def _materialised(module: nn.Module) -> nn.Module:
    """A copy of a unit with fp32 storage for its parameters; buffers keep their values."""
    memo: dict[int, nn.Parameter] = {}
    for parameter in module.parameters():
        value = torch.full(parameter.shape, torch.nan) if parameter.is_meta else parameter.detach().clone()
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


def _submodels(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, m) for name, m in model.named_modules() if is_transformers(m)] if is_transformers(model) else []


def _initialise(
    made: nn.Module, unit: str, seed: int, model: nn.Module, submodels: list[tuple[str, nn.Module]]
) -> None:
    """Children first, as transformers does; each module under its own seed."""
    for suffix, module in reversed(list(made.named_modules())):
        name = f"{unit}.{suffix}" if suffix and unit else unit or suffix
        torch.manual_seed(seed_of(seed, "init", name))
        owner = next(
            (m for prefix, m in reversed(submodels) if name == prefix or name.startswith(f"{prefix}.") or not prefix),
            None,
        )
        if owner is not None:
            module.__dict__.pop("_is_hf_initialized", None)
            owner._init_weights(module)  # type: ignore[operator]
        elif callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()  # type: ignore[operator]
    for suffix, parameter in made.named_parameters():
        if bool(parameter.isnan().any()):
            raise RefusedError(
                f"parameter {unit}.{suffix} was built under lindos.lazy(), and no rule gives it a value: its "
                f"module has no "
                "reset_parameters(), its model's _init_weights does not know it. Add one, or build the model "
                "without lazy()."
            )
