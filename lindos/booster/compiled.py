"""torch.compile over each block, under every plan; collectives stay Python calls between the compiled pieces."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lindos.core.errors import RefusedError
from lindos.parallel.dropout import Dropout
from lindos.parallel.tensor import ops
from lindos.parallel.tensor.forwards import Crossing


def refuse_without_compiler(device: torch.device) -> None:
    """
    Raises:
        RefusedError: nothing here can build what torch.compile writes. No other backend is put in its place.
    """
    if device.type == "cpu":
        from torch._inductor import config

        names = [name for name in config.cpp.cxx if name]
        if not any(shutil.which(name) for name in names):
            raise RefusedError(
                f"compile=True needs a C++ compiler on a CPU; none of {names} is on the path. Install g++ "
                "(Debian: apt install g++) or name yours in CXX, or leave compile=False."
            )
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise RefusedError(
            f"compile=True needs Triton on {device.type}; torch finds none for this device. Install triton, or leave "
            "compile=False."
        )


def stop_at_collectives(crossing: Crossing | None, blocks: int) -> None:
    """Compiled code ends before what talks to ranks or remembers between calls, and begins again after it.

    Marked here and not by a decorator there, because a decorator would import the compiler with lindos.
    """
    import torch._dynamo as dynamo

    for owner, names in ((ops, ("copy", "total", "gather", "split")), (Dropout, ("_dropout", "_attention"))):
        for name in names:
            _stop(owner, name)
    if crossing is not None:
        for name in ("enter", "leave"):
            _stop(crossing, name)
    # Blocks share their code: past this many variants of one piece torch would go on without compiling, silently.
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, 8 * blocks)
    dynamo.config.accumulated_recompile_limit = max(dynamo.config.accumulated_recompile_limit, 64 * blocks)


def _stop(owner: Any, name: str) -> None:
    function = getattr(owner, name)
    if not getattr(function, "_torchdynamo_disable", False):
        setattr(owner, name, torch.compiler.disable(function, reason="it talks to other ranks or remembers calls"))


def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward, compiled at its first call."""
    return torch.compile(forward)


def run_again(forward: Callable[..., Any], dropout: Dropout | None, *args: Any, **kwargs: Any) -> Any:
    """A compiled block that keeps its inputs: its whole forward, collectives included, runs again in backward.

    The first run is without a graph and the second has its own backward. Torch's other form compares the tensors that
    both runs save, and fails where they meet different compiled variants, as after a change of shape.
    """
    leaves, form = tree_flatten((args, kwargs))
    spot: list[Any] = []
    again = dropout.replay() if dropout is not None else nullcontext
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def run(_: torch.Tensor, *given: torch.Tensor) -> tuple[Any, ...]:
        filled = dict(zip(tensors, given))
        both = tree_unflatten([filled.get(i, leaf) for i, leaf in enumerate(leaves)], form)
        with again() if torch.is_grad_enabled() else nullcontext():
            flat, spec = tree_flatten(forward(*both[0], **both[1]))
        spot[:] = [spec]
        return tuple(flat)

    # Without an input that needs a gradient there would be none for the parameters either.
    begin = torch.zeros((), requires_grad=True)
    flat = checkpoint(run, begin, *(leaves[i] for i in tensors), use_reentrant=True)
    return tree_unflatten(list(flat), spot[0])
