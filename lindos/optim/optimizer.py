"""One optimizer class over the user's own: its groups stay the same dicts, its parameters become this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from lindos.core.errors import InputError


class Optimizer(torch.optim.Optimizer):
    """The user's optimizer, stepping this rank's shards.

    `step()` clips, steps and publishes; `zero_grad()` makes the next backward store instead of add. State is saved by
    `booster.save` only: `state_dict()` of one rank's shards would be a checkpoint that only this plan loads.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        before: Callable[[], bool],
        after: Callable[[], None],
        forget: Callable[[], None],
    ) -> None:
        # torch's own __init__ would copy the groups; schedulers hold the dicts of `inner`, so they are shared instead.
        self.inner, self._before, self._after, self._forget = inner, before, after, forget
        self.defaults, self.state, self.param_groups = inner.defaults, inner.state, inner.param_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __repr__(self) -> str:
        return f"lindos {self.inner!r}"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip to max_norm, step, publish masters.

        Raises:
            InputError: a closure; gradients that are missing, unreduced or came from a plain loss.backward().
        """
        if closure is not None:
            raise InputError("optimizer.step() takes no closure: gradients are reduced before it, by booster.backward.")
        if self._before():
            self.inner.step()
            self._after()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget this step's gradients."""
        self._forget()

    def state_dict(self) -> NoReturn:  # type: ignore[override]
        raise InputError("the state of a sharded optimizer is saved by booster.save(path), which any plan can load.")

    def load_state_dict(self, state_dict: Any) -> NoReturn:  # type: ignore[override]
        raise InputError("the state of a sharded optimizer is loaded by booster.load(path).")

    def add_param_group(self, param_group: Any) -> NoReturn:  # type: ignore[override]
        raise InputError("add parameter groups before booster.boost(model, optimizer).")


def check(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> set[str]:
    """Names of the parameters that an optimizer steps.

    Args:
        names: parameter name by identity.

    Raises:
        InputError: the optimizer has state, or a parameter that the model lacks, or steps one twice.
    """
    if isinstance(optimizer, Optimizer):
        raise InputError("this optimizer was boosted before; give the one that you made.")
    if any(optimizer.state.values()):
        raise InputError(
            "the optimizer already has state, which cannot be spread exactly. Boost before its first step."
        )
    found: set[str] = set()
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                shape = list(parameter.shape)
                raise InputError(
                    f"parameter {j} of optimizer group {i}, of shape {shape}, is not a parameter of the model. "
                    "Make the optimizer from the model's own parameters, after any change of them."
                )
            if name in found:
                raise InputError(f"parameter {name!r} is in the optimizer twice.")
            found.add(name)
    return found


def spread(optimizer: torch.optim.Optimizer, names: Mapping[int, str], shards: Mapping[str, nn.Parameter]) -> None:
    """Put this rank's shards in the place of the parameters, in the same group dicts; frozen ones are left out."""
    for group in optimizer.param_groups:
        wanted = (names[id(parameter)] for parameter in group["params"])
        group["params"] = [shards[name] for name in wanted if name in shards]
    optimizer.state.clear()
