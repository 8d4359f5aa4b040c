"""Recompute and activations: what each call of a block keeps for backward, and where.

The model's blocks run inside frames (memory/frame.py). "full" keeps a block's input, "selective" keeps what products
with weights, fused attention and collectives made, a budget keeps as much as fits. Only operations run again, never
the block's Python code (memory/tape.py), except in compiled blocks, which have no operations to show.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lindos.booster.blocks import Block
from lindos.booster.compiled import compiled, run_again
from lindos.comm.world import World
from lindos.core.errors import InputError
from lindos.core.units import text_of_bytes
from lindos.memory.frame import Frame
from lindos.memory.homes import Homes
from lindos.memory.keep import FULL, SELECTIVE, Policy
from lindos.memory.saved import Saved, saved_bytes
from lindos.memory.tape import COLLECTIVE
from lindos.parallel.dropout import Dropout

Signature = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Share:
    """One call's part of a budget.

    Attributes:
        collectives: keep the results of collectives; the same on all ranks of a tensor group.
        budget_bytes: for what the call keeps; None: everything.
    """

    collectives: bool
    budget_bytes: int | None


class Recompute:
    """Gives blocks a forward inside a frame.

    Args:
        setting: "none", "full", "selective" or a budget in bytes.
        homes: where kept activations rest, or None for the device.

    Attributes:
        shares: of each shape of micro-batch that a budget was divided for.
    """

    def __init__(self, model: nn.Module, setting: str | int, homes: Homes | None, world: World) -> None:
        self.model, self.setting, self.homes, self.world = model, setting, homes, world
        self.forwards: dict[str, Callable[..., Any]] = {}
        self.compiled = False
        self.dropout: Dropout | None = None
        self.shares: dict[Signature, list[Share]] = {}
        self._parameters: set[int] = set()
        self._seen: dict[int, StorageWeakRef] = {}
        self._measured: list[tuple[int, int, int]] = []
        self._plan: list[Share] | None = None
        self._calls = self._spare = 0
        self._inside = self._measuring = False
        self._before: weakref.ref[Frame] | None = None

    def install(self, blocks: list[Block]) -> None:
        """Put every block's forward inside a frame."""
        for block in blocks:
            own = self.forwards[block.name] = block.module.forward
            block.module.forward = functools.wraps(own)(functools.partial(self._forward, block.name))

    def compile(self) -> None:
        """Compile what lies inside the frames: frames look at what compiled code saves, and stay out of it."""
        self.compiled = True
        self.forwards = {name: compiled(own) for name, own in self.forwards.items()}

    def _forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        own = self.forwards[name]
        if self._inside or not torch.is_grad_enabled():
            return own(*args, **kwargs)
        policy, budget = self._policy()
        if self.compiled and policy is FULL:
            own, policy = functools.partial(run_again, own, self.dropout), None
        if policy is None and self.homes is None:
            return own(*args, **kwargs)
        before = self._before() if self._before is not None else None
        frame = Frame(name, self._parameters or self._storages(), policy, self.homes, before, self._seen)
        self._before = weakref.ref(frame)
        self._inside = True
        try:
            with frame:
                out = own(*args, **kwargs)
        finally:
            self._inside = False
        assert frame.choice is not None
        if self._measuring:
            self._measured.append((frame.choice.count_bytes, frame.all_bytes, frame.collective_bytes))
        if budget is not None:
            self._spare += budget - frame.choice.count_bytes
        return out

    def _storages(self) -> set[int]:
        return {p.untyped_storage()._cdata for p in self.model.parameters()}

    def _policy(self) -> tuple[Policy | None, int | None]:
        """What this call of a block follows, and its budget in bytes."""
        if self.setting in ("none", "full", "selective"):
            return {"none": None, "full": FULL, "selective": SELECTIVE}[self.setting], None
        number, self._calls = self._calls, self._calls + 1
        if self._plan is None or number >= len(self._plan):
            return FULL, None
        share = self._plan[number]
        if share.budget_bytes is None:
            return None, None
        kinds = frozenset({COLLECTIVE}) if share.collectives else frozenset()
        return Policy(kinds, share.budget_bytes + max(0, self._spare)), share.budget_bytes

    @contextmanager
    def around(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Around one forward of the model, and its loss where that is computed here.

        Communicates: under a budget, for a shape that is new, one all_reduce over tp of 2 numbers and one a block; for
            the first shape one exchange through the store too.

        Raises:
            InputError: on all ranks, after the first forward: the budget is smaller than what recompute="full" keeps. A
                later shape that is too large runs as "full", with a warning.
        """
        self._before, self._parameters, self._seen = None, self._storages(), {}
        if isinstance(self.setting, str) or not torch.is_grad_enabled():
            yield
            return
        tensors = ((name, x) for name, x in sorted(inputs.items()) if isinstance(x, torch.Tensor))
        shape = tuple((name, tuple(x.shape)) for name, x in tensors)
        self._plan, self._calls, self._spare = self.shares.get(shape), 0, 0
        try:
            if self._plan is not None:
                yield
                return
            self._measuring, self._measured = True, []
            with saved_bytes(self.model.parameters()) as saved:
                yield
                self.shares[shape] = self._divide(saved)
        finally:
            self._plan, self._measuring = None, False

    def _divide(self, saved: Saved) -> list[Share]:
        """Each call's share of the budget: what the smallest leaves, in proportion to what each call could use."""
        assert isinstance(self.setting, int)
        calls = self._measured
        least = saved.device_bytes + saved.host_bytes
        largest = self._largest(least)
        if self.setting < largest:
            text = (
                f"recompute={self.setting}: the smallest budget for this model and micro-batch is {largest} bytes "
                f"({text_of_bytes(largest)}), what recompute='full' keeps on the rank that keeps most. Give at least "
                "that, or smaller micro-batches."
            )
            if not self.shares:
                raise InputError(text)
            # Ranks of other dp coordinates may have seen this shape before: an error here would be theirs alone.
            warnings.warn(f"{text} A batch of a new shape runs as recompute='full', over the budget.", stacklevel=2)
            return [Share(False, small) for small, _, _ in calls]
        rooms = [max(0, full - small) for small, full, _ in calls]
        spare = self.setting - least
        fits = spare >= sum(rooms)
        extra = rooms if fits else [int(room * spare / sum(rooms)) for room in rooms]
        lacks = [not fits, *(more < collectives for more, (_, _, collectives) in zip(extra, calls))]
        lacks = self._agreed(lacks)
        if not lacks[0]:
            return [Share(True, None)] * len(calls)
        return [Share(not lack, small + more) for lack, more, (small, _, _) in zip(lacks[1:], extra, calls)]

    def _largest(self, least: int) -> int:
        """The largest of the ranks' smallest budgets: of all ranks the first time, then of this tensor group."""
        if not self.shares:
            return max(self.world.exchange(least, "smallest recompute budget"))
        if self.world.mesh.size("tp") == 1:
            return least
        mine = torch.tensor([least], dtype=torch.int64, device=self.world.device)
        return int(self.world.all_reduce(mine, "tp", "smallest recompute budget", "max"))

    def _agreed(self, lacks: list[bool]) -> list[bool]:
        """What any rank of the tensor group lacks, all lack: they must make the same collectives again."""
        if self.world.mesh.size("tp") == 1:
            return lacks
        mine = torch.tensor(lacks, dtype=torch.int64, device=self.world.device)
        return [bool(lack) for lack in self.world.all_reduce(mine, "tp", "recompute shares", "max").tolist()]

    def text(self) -> str:
        """For `describe`."""
        what = f"a budget of {text_of_bytes(self.setting)}" if isinstance(self.setting, int) else self.setting
        home, form = "host" if self.homes else "device", "compiled " if self.compiled else ""
        return f"recompute {what} over {len(self.forwards)} {form}blocks; what they save rests on {home}"
