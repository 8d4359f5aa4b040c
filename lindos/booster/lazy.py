"""Models without memory: parameters on meta until the plan is known."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lindos.core.errors import InputError, RefusedError
from lindos.hf import models


class _NoStorage(TorchFunctionMode):
    """torch.empty without a device of its own goes to meta: that is how modules make what they fill later.

    Attributes:
        lost: where a value was written into a parameter by code that boost cannot repeat.
    """

    lost: str = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        target = next(iter((*args, *kwargs.values())), None)  # torch.nn.init gives its tensor by keyword
        if writes and not self.lost and isinstance(target, torch.Tensor) and target.is_meta:
            self.lost = _unrepeatable(sys._getframe(1))
        return func(*args, **kwargs)


def _unrepeatable(frame: FrameType | None) -> str:
    """Empty if a write comes from reset_parameters or transformers, whose rules boost runs again; else where it is."""
    first = ""
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("reset_parameters", "_reset_parameters") or "transformers" in code.co_filename.split("/"):
            return ""
        if not first and "torch" not in code.co_filename.split("/") and code.co_filename != __file__:
            first = f"{code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return first


@contextmanager
def lazy() -> Iterator[None]:
    """Build a model inside this block: no parameter is allocated, buffers get their true values.

    Values come at `Booster.boost`, in fp32, from the model's own initialisation rule, each module under a seed made of
    the launch seed and its name: the same under every plan and world size.

    Raises:
        InputError: a buffer is left without a value.
        RefusedError: a parameter is initialised by code that is neither reset_parameters nor transformers' own.

    Example:
        >>> with lazy():
        ...     layer = nn.Linear(4, 4)
        >>> layer.weight.device.type
        'meta'
    """
    mode = _NoStorage()
    register = nn.Module.register_parameter
    buffers: list[tuple[str, torch.Tensor]] = []
    register_buffer = nn.Module.register_buffer

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            moved = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            moved.__dict__.update(param.__dict__)
            param = moved
        register(self, name, param)

    def seen(self: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        register_buffer(self, name, tensor, persistent)
        if tensor is not None:
            buffers.append((f"{type(self).__name__}.{name}", tensor))

    nn.Module.register_parameter, nn.Module.register_buffer = on_meta, seen  # type: ignore[method-assign]
    try:
        with mode:
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]
    if mode.lost:
        raise RefusedError(
            f"a parameter is initialised at {mode.lost}, by code that boost cannot run again: the value would be lost. "
            "Move it into the module's reset_parameters(), or build the model without lazy()."
        )
    bad = next((name for name, tensor in buffers if tensor.is_meta), None)
    if bad:
        raise InputError(
            f"buffer {bad} has no value: it was made by torch.empty under lazy(). Build it from zeros or ones."
        )


def from_pretrained(path: str | Path) -> nn.Module:
    """The causal language model of a transformers folder, lazily: each rank reads its own slices at `boost`.

    Raises:
        DataError: no such folder, no config.json, no safetensors file.
    """
    config = models.config_of(str(path))
    with lazy():
        model = models.model_of(config)
    model.__dict__["_lindos_folder"] = str(path)
    return model
