"""What happens around the model's own forward: labels taken out, logits kept local, the loss made by one rule."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lindos.booster import batch as batches
from lindos.booster.compose import Plan
from lindos.booster.loss import GlobalMean, Loss, Sums
from lindos.core.errors import InputError
from lindos.hf import models
from lindos.parallel.dropout import Dropout, has_dropout


class Calls:
    """The boosted model's forward.

    Attributes:
        step: number of the step, a part of dropout's key.
    """

    def __init__(self, model: nn.Module, plan: Plan, loss: Loss, cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.model, self.plan, self.loss, self.cast = model, plan, loss, cast
        self.step = self.seen_rows = 0
        self._own = functools.partial(type(model).forward, model)
        self._inside = False
        self.dropout: Dropout | None = None
        if has_dropout(model):
            self.dropout = Dropout(plan.world.seed, self._inner)
            self.dropout.watch(model)
        if plan.recompute is not None:
            plan.recompute.dropout = self.dropout
        model.forward = self.forward  # type: ignore[method-assign]

    def _inner(self) -> tuple[int, int] | None:
        crossing = self.plan.tensor.crossing if self.plan.tensor else None
        return crossing.place if crossing is not None and crossing.on_inner else None

    @contextmanager
    def local_logits(self, local: bool) -> Iterator[None]:
        crossing = self.plan.tensor.crossing if self.plan.tensor else None
        if crossing is None:
            yield
            return
        before, crossing.local_logits = crossing.local_logits, local
        try:
            yield
        finally:
            crossing.local_logits = before

    @contextmanager
    def dropping(self, micro: Mapping[str, Any], first_row: int) -> Iterator[None]:
        """Keyed dropout for the forward and backward of one call."""
        if self.dropout is None or not self.model.training:
            yield
            return
        first = next(
            (v for k, v in micro.items() if isinstance(v, torch.Tensor) and k in ("input_ids", "inputs_embeds")), None
        )
        first = first if first is not None else next(v for v in micro.values() if isinstance(v, torch.Tensor))
        self.dropout.begin(self.step, first_row, first.shape[0], first.shape[1] if first.dim() > 1 else 1)
        with self.dropout:
            yield

    def sums(self, micro: Mapping[str, Any]) -> tuple[Sums, torch.Tensor | None]:
        """Forward of one micro-batch inside a step: its sum of losses and the accepted auxiliary loss."""
        inputs = self.loss.inputs(micro)
        if self.loss.kind == "custom" and "labels" in micro and "labels" in self._accepted():
            inputs["labels"] = micro["labels"]
        self._inside = True
        try:
            with self.local_logits(self.loss.local_logits):
                inputs = {name: self.cast(v) if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
                with self._keeping(inputs):
                    outputs = self.model(**{**self._no_cache(), **inputs})
                    return self.loss.sums(outputs, micro, self.plan.world), self.loss.extra(outputs)
        finally:
            self._inside = False

    def _keeping(self, inputs: dict[str, Any]) -> AbstractContextManager[None]:
        """Around a forward and its loss: what they may keep for backward."""
        return self.plan.recompute.around(inputs) if self.plan.recompute is not None else nullcontext()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward as the user calls it.

        With labels (and no loss of the user's own): `.loss` is the mean over the valid positions of all ranks in this
        call, its backward scaled so that the mean over ranks is exact; `.logits` is None. Without: whole logits.

        Communicates: with labels, an all_gather of 4 numbers over the world and an all_reduce of 1 over dp and sp;
            besides
        what the plan's axes do.
        """
        if self._inside:
            return self._own(*args, **kwargs)
        labels = kwargs.get("labels")
        if labels is not None and self.loss.kind in ("custom", None):
            raise InputError(
                "the model's own loss would be this rank's mean, not that of all ranks. Call it without labels "
                "and give "
                "booster.backward your own loss, or use booster.step with Booster(loss=fn)."
            )
        if labels is None:
            return self._plain(args, kwargs)
        if args:
            raise InputError("call the model with keywords, model(**batch), when labels are given.")
        joined = Joined.of(kwargs, self.loss, self.plan)
        with self.dropping(kwargs, self.seen_rows + joined.first_row):
            sums, extra = self.sums(kwargs)
        if self.model.training:
            self.seen_rows += joined.all_rows
        mesh = self.plan.world.mesh
        factor = mesh.size(("dp", "sp"))
        loss = GlobalMean.apply(sums.total, joined.count, factor, self.plan.world, ("dp", "sp"))
        if extra is not None:
            loss = loss + GlobalMean.apply(extra, factor, factor, self.plan.world, ("dp", "sp"))
        return models.output_of(loss)

    def _plain(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
        tensors = {k: v for k, v in tensors.items() if isinstance(v, torch.Tensor)}
        first_row = 0
        if self.dropout is not None and self.model.training and tensors:
            rows = self._rows(tensors)
            first_row = self.seen_rows + sum(rows[: self.plan.world.mesh.coordinate("dp")])
            self.seen_rows += sum(rows)
        dropping = self.dropping(tensors, first_row) if tensors else nullcontext()
        with self.local_logits(False), dropping, self._keeping(tensors):
            return self._own(*args, **kwargs)

    def _rows(self, tensors: dict[str, torch.Tensor]) -> list[int]:
        """Rows of every dp rank in this call, for dropout's key."""
        world = self.plan.world
        mine = torch.tensor([next(iter(tensors.values())).shape[0]], device=world.device)
        return world.all_gather(mine, "dp", 0, "rows").tolist()

    def _accepted(self) -> frozenset[str]:
        """Names of the arguments that the model's own forward takes."""
        return frozenset(inspect.signature(type(self.model).forward).parameters)

    def _no_cache(self) -> dict[str, Any]:
        """Generation's cache is of no use in a loss and costs memory."""
        config = getattr(self.model, "config", None)
        generates = self.loss.kind in ("causal", "conditional")
        return {"use_cache": False} if generates and hasattr(config, "use_cache") else {}


class Joined:
    """What all ranks' shares of one call add up to, agreed before any gradient exists.

    Attributes:
        count: valid positions over dp and sp; None where only the user's loss can tell.
        first_row: index of this rank's first row among the rows of all dp ranks.
        rows, all_rows: of this rank's share, of all.
    """

    def __init__(self, count: int | None, first_row: int, rows: int, all_rows: int) -> None:
        self.count, self.first_row, self.rows, self.all_rows = count, first_row, rows, all_rows

    @staticmethod
    def of(batch: Any, loss: Loss, plan: Plan, micro_batches: int = 1) -> Joined:
        """
        Communicates: all_gather of 4 numbers over the world.

        Raises:
            InputError: on all ranks: a bad batch on any rank; different batches on ranks of one dp coordinate; no valid
                position on any rank.
        """
        world = plan.world
        error: InputError | None = None
        rows, count, mark = 0, 0, 0
        try:
            rows = batches.rows_of(batch, micro_batches)
            counted = loss.counted(batch)
            count, mark = -1 if counted is None else counted, batches.digest(batch) if world.size > 1 else 0
        except InputError as found:
            error = found
        mine = torch.tensor([[error is not None, rows, count, mark]], dtype=torch.int64)
        seen = (
            world.all_gather(mine.to(world.device), world.all, 0, "batch").tolist() if world.size > 1 else mine.tolist()
        )
        if any(line[0] for line in seen):
            world.agree(error, "batch")
        mesh = world.mesh
        firsts = {}
        for rank, line in enumerate(seen):
            dp = mesh.coordinate("dp", rank)
            first = firsts.setdefault(dp, (rank, line))
            if line[1:] != first[1][1:]:
                raise InputError(
                    f"ranks {first[0]} and {rank} have dp coordinate {dp} and different batches. Ranks that "
                    f"differ in tp, sp and "
                    "pp must take the same rows: shard the data by booster.mesh.coordinate('dp'), not by rank."
                )
        shares = [firsts[dp][1] for dp in sorted(firsts)]
        first_row, all_rows = (sum(line[1] for line in part) for part in (shares[: mesh.coordinate("dp")], shares))
        if any(line[2] < 0 for line in shares):
            return Joined(None, first_row, rows, all_rows)
        total = sum(line[2] for line in shares)
        if total == 0:
            raise InputError(
                "no rank's batch has a valid position: every shifted label is -100, so there is no loss to take."
            )
        return Joined(total, first_row, rows, all_rows)
