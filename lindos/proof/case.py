"""One case to be proven: the model, the plan, the data. A plain value, so that it travels to the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lindos.booster.plugins import DDP, Gemini, HybridParallel, LowLevelZero, Plugin
from lindos.core.errors import InputError, RefusedError, nearest
from lindos.hf import models
from lindos.hf.kinds import CLASSES_OF, kind_of_type
from lindos.hf.twin import batch, check_tied, twin, twin_config

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
PLUGINS: dict[str, Callable[..., Plugin]] = {
    "ddp": DDP,
    "hybrid": HybridParallel,
    "zero1": lambda **axes: LowLevelZero(stage=1, **axes),
    "zero2": lambda **axes: LowLevelZero(stage=2, **axes),
    "gemini_auto": lambda **axes: Gemini(placement="auto", **axes),
    "gemini_static": lambda **axes: Gemini(placement="static", **axes),
}


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        model_type: a transformers type; its twin is proven.
        folder: a model folder whose configuration's twin is proven instead.
        kind: what the model is for (lindos.hf.kinds); empty means the type's natural kind.
        plugin: the plan.
        dp: data-parallel size; the world is dp x tp x pp x sp.
        overrides: generic words for the twin: heads, kv_heads, vocabulary, tied, layers, hidden, ...
        max_norm, micro_batches, steps: of the run.
        fault: a planted fault, for the tests of the proof itself.
        seed: of the data.
    """

    model_type: str = ""
    folder: str = ""
    kind: str = ""
    plugin: Plugin = field(default_factory=DDP)
    dp: int = 1
    overrides: tuple[tuple[str, Any], ...] = ()
    max_norm: float | None = 1.0
    micro_batches: int = 1
    steps: int = 3
    fault: str = ""
    seed: int = 0

    @property
    def world_size(self) -> int:
        return self.dp * self.plugin.tp * self.plugin.pp * self.plugin.sp

    def model(self, dtype: torch.dtype) -> nn.Module:
        """The twin; of one seed, so that every side starts from the same weights. fp64 twins hold fp32 values."""
        source = models.config_of(self.folder) if self.folder else self.model_type
        if self.folder or self.overrides:
            source = twin_config(source, self.kind_meant, **dict(self.overrides))
        model = twin(source, seed=1, dtype=torch.float32, kind=self.kind_meant)
        if "tied" in dict(self.overrides):
            check_tied(model, dict(self.overrides)["tied"])
        found, meant = models.kind_of(model), self.kind_meant
        if found != ("classification" if meant in CLASSES_OF else meant):
            raise RefusedError(
                f"{type(model).__name__} of transformers is no {meant} model: its loss is of kind {found}."
            )
        return model.to(dtype)

    @property
    def kind_meant(self) -> str:
        """The kind that is given, or the natural one of the type."""
        return kind_of_type(self.model_type or models.config_of(self.folder).model_type, self.kind or None)

    def share(self, config: Any, step: int, dp: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """The batch of one dp rank: its own rows, length, label counts and padding, on the left in every second row.

        Args:
            dtype: of pixels and other inputs that are no ids; their values are fp32's.
        """
        rows, kind = max(3 + dp, self.micro_batches), self.kind_meant
        made = batch(config, rows, 11 + 2 * dp, seed=10_000 * self.seed + 100 * step + dp, kind=kind)
        for row in range(1, rows, 2) if kind in ("causal", "masked", "token") else ():
            padding = int((made["attention_mask"][row] == 0).sum())
            for value in made.values():
                value[row] = value[row].roll(padding)
            if kind == "causal":
                made["labels"][row, : padding + 1] = -100
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in made.items()}


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    """A rate that changes at every step, so that one that is not passed on shows."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def plugin_of(name: str | None, axes: dict[str, Any]) -> Plugin:
    """A plugin by the command line's name.

    Raises:
        InputError: no such name.
    """
    if name is None:
        return HybridParallel(**axes)
    if name not in PLUGINS:
        raise InputError(f"plugin {name!r}: {nearest(name, PLUGINS)}.")
    return PLUGINS[name](**axes)
