"""One optimizer class over the user's own: its groups stay the same dicts, its parameters become this rank's shards."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from lindos.core.errors import InputError, RefusedError


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


def check(optimizer: torch.optim.Optimizer, names: Mapping[int, str], shared: bool = False) -> set[str]:
    """Names of the parameters that an optimizer steps.

    Args:
        names: parameter name by identity.
        shared: ranks step parts of parameters, so it must be elementwise.

    Raises:
        InputError: the optimizer has state, or a parameter that the model lacks, or steps one twice.
        RefusedError: it is not elementwise, and `shared`.
    """
    if isinstance(optimizer, Optimizer):
        raise InputError("this optimizer was boosted before; give the one that you made.")
    for parameter, state in optimizer.state.items():
        initial(state, parameter, parameter)
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
    if shared:
        refuse_whole(optimizer)
    return found


def initial(state: Mapping[str, Any], parameter: torch.Tensor, shard: torch.Tensor) -> dict[str, Any]:
    """What an optimizer's own __init__ put into the state of a parameter (Adagrad's sums), for a part of it.

    Raises:
        InputError: it is more than constants, so steps were taken.
    """
    made: dict[str, Any] = {}
    for key, value in state.items():
        like = torch.is_tensor(value) and value.dim() > 0 and value.numel() > 0
        if (like and (value.shape != parameter.shape or bool((value != value.reshape(-1)[0]).any()))) or (
            key == "step" and float(value) != 0
        ):
            raise InputError(
                "the optimizer already has state, which cannot be spread exactly. Boost before its first step."
            )
        first = value.reshape(-1)[0].item() if like else None
        made[key] = torch.full_like(shard, first, dtype=value.dtype) if like else copy.deepcopy(value)
    return made


def refuse_whole(optimizer: torch.optim.Optimizer) -> None:
    """A probe: a small matrix stepped whole, and in two flat halves, must come out bit-equal.

    Raises:
        RefusedError: it does not, or the optimizer cannot step a flat tensor: norms of whole tensors, factored or
            orthogonalised moments.
    """
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        like = group["params"][0]
        try:
            whole, halves = _stepped(optimizer, group, like, 1), _stepped(optimizer, group, like, 2)
        except Exception as error:
            reason = f"it cannot step a flat part of a parameter ({type(error).__name__}: {error})"
        else:
            if torch.equal(whole, halves):
                continue
            reason = "a part of a parameter steps differently from the whole"
        raise RefusedError(
            f"{name} is not elementwise: {reason}, so its state cannot be shared over dp. Use an elementwise optimizer "
            "(AdamW, SGD, Adagrad, RMSprop, ...), or zero=0 (DDP), which steps whole parameters."
        )


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], like: torch.Tensor, parts: int) -> torch.Tensor:
    """Three steps of a copy of the optimizer on one tensor [8, 32], or on its flat parts."""
    device = torch.device("cpu") if like.is_meta else like.device
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(8, 32, generator=draw, dtype=torch.float64).to(device, like.dtype) for _ in range(4)]
    tensors = [values[0].clone()] if parts == 1 else list(values[0].clone().view(parts, -1).unbind())
    probe = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        probe.__dict__[hooks] = OrderedDict()
    rate = group.get("lr", 0.1)
    rate = rate.clone().fill_(0.1) if torch.is_tensor(rate) else 0.1  # a warm-up may begin at 0, where nothing moves
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    probe.param_groups, probe.state = [{**group, "lr": rate, "params": parameters}], defaultdict(dict)
    for parameter in parameters:
        probe.state[parameter].update(initial(optimizer.state.get(like, {}), like, parameter))
    for gradient in values[1:]:
        parts_of = [gradient] if parts == 1 else gradient.view(parts, -1).unbind()
        for parameter, part in zip(parameters, parts_of):
            parameter.grad = part.clone()
        probe.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def spread(optimizer: torch.optim.Optimizer, names: Mapping[int, str], shards: Mapping[str, nn.Parameter]) -> None:
    """Put this rank's shards in the place of the parameters, in the same group dicts; frozen ones are left out."""
    begun = [(shards.get(names[id(p)]), p, state) for p, state in optimizer.state.items() if state]
    optimizer.state.clear()
    for shard, parameter, state in begun:
        if shard is not None:
            optimizer.state[shard].update(initial(state, parameter, shard.detach()))
    for group in optimizer.param_groups:
        wanted = (names[id(parameter)] for parameter in group["params"])
        group["params"] = [shards[name] for name in wanted if name in shards]
