"""Collectives through torch.distributed's process groups: NCCL on CUDA, gloo across hosts.

Gloo ends the process when two ranks send different sizes, so each gloo call is preceded by an 8-byte gather of its
signature. Its reduce_scatter is made of an all_to_all and a local sum, which takes a third of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lindos.comm.mailbox import Mismatch

_SLICE = timedelta(seconds=0.25)


class Group:
    """One process group with the same calls as `Mailboxes`."""

    def __init__(self, group: Any, ranks: tuple[int, ...], index: int, tick: Callable[[float], None]) -> None:
        self.group, self.ranks, self.index, self.size, self.tick = group, ranks, index, len(ranks), tick
        self.gloo = dist.get_backend(group) == "gloo"

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor, signature: int, op: str) -> None:
        self._agree(signature)
        kind = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        if out is not x:
            out.copy_(x)
        self._finish(dist.all_reduce(out, kind, group=self.group, async_op=True))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, signature: int) -> None:
        self._agree(signature)
        self._finish(_all_gather(out.view(-1), x, group=self.group, async_op=True))

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, signature: int) -> None:
        self._agree(signature)
        if self.gloo:
            rows = torch.empty_like(x)
            self._finish(dist.all_to_all_single(rows, x.contiguous(), group=self.group, async_op=True))
            wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
            out.copy_(rows.sum(0, dtype=wide))
        else:
            self._finish(_reduce_scatter(out, x.contiguous().view(-1), group=self.group, async_op=True))

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, signature: int) -> None:
        self._agree(signature)
        self._finish(dist.all_to_all_single(out, x.contiguous(), group=self.group, async_op=True))

    def broadcast(self, x: torch.Tensor, source: int, signature: int) -> None:
        self._agree(signature)
        self._finish(dist.broadcast(x, self.ranks[source], group=self.group, async_op=True))

    def _agree(self, signature: int) -> None:
        if not self.gloo:
            return
        mine = torch.tensor([signature])
        seen = torch.empty(self.size, dtype=torch.int64)
        self._finish(_all_gather(seen, mine, group=self.group, async_op=True))
        for i, other in enumerate(seen.tolist()):
            if other != signature:
                raise Mismatch(i)

    def _finish(self, work: Any) -> None:
        if not self.gloo:
            work.wait()  # orders the stream; the host goes on
            return
        started = time.monotonic()
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    raise
                self.tick(started)


# torch 2.13 renames these; the old names remain the only ones in 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
