"""The loss: one sum over valid positions, one count, one rule of normalisation.

With N = valid positions over all dp and sp ranks and micro-batches of a step, the gradient is that of
(sum of losses) / N. The mean over dp that the chunk program makes is undone by a factor dp, so that each piece of the
loss enters the gradient with 1/N exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lindos.booster.batch import IGNORED, shift
from lindos.comm.world import World
from lindos.core.errors import InputError, RefusedError
from lindos.hf import models
from lindos.parallel.tensor.vocabulary import cross_entropy

LossFunction = Callable[[Any, Mapping[str, Any]], tuple[Any, ...]]
ALLOWED = ("router_aux_loss", "whole")


def per_token(function: LossFunction) -> LossFunction:
    """Mark a loss that reads `shift_labels` only, position by position, so that sequence parallelism may cut it."""
    function.per_token = True  # type: ignore[attr-defined]
    return function


@dataclass
class Sums:
    """Of one micro-batch of this rank: sum of losses (with a graph), count, and metrics as (sum, count)."""

    total: torch.Tensor
    count: torch.Tensor | int
    metrics: dict[str, tuple[Any, Any]]


class Loss:
    """How a model's outputs and a batch become a sum and a count.

    Attributes:
        kind: causal, masked, classification, conditional (labels are the decoder's targets, not shifted), or custom
            for a function of the user's.
        router: coefficient of an auxiliary router loss that is accepted as the mean over shares.
    """

    def __init__(
        self, model: nn.Module, function: LossFunction | None, allow: tuple[str, ...], vocabulary: int | None
    ) -> None:
        self.function, self.vocabulary = function, vocabulary
        self.kind = "custom" if function is not None else models.kind_of(model)
        self.router = models.router_loss(model)
        self.ids = models.ids_of(model)
        self.classes = vocabulary if self.local_logits else models.classes_of(model)
        self.decoder_inputs = models.decoder_inputs(model) if self.kind == "conditional" else None
        self.name = type(model).__name__
        why = None if function is not None else models.other_loss(model)
        if why:
            raise RefusedError(f"{type(model).__name__}: {why}. Give Booster(loss=fn).")
        if self.router and function is not None:
            raise RefusedError(
                "a loss function of your own decides what is lost, and a router's auxiliary loss would be "
                "scaled by its count: "
                "set config.output_router_logits=False and add what you want in fn."
            )
        if self.router and "router_aux_loss" not in allow:
            raise RefusedError(
                "the model adds a router's auxiliary loss, which is no sum over positions: its value depends on "
                "how the batch "
                "is cut. Set config.output_router_logits=False, or accept the mean over shares with "
                'allow=("router_aux_loss",).'
            )

    @property
    def local_logits(self) -> bool:
        """Whether logits stay cut over the vocabulary on their way into the loss."""
        return self.kind in ("causal", "masked", "conditional")

    def counted(self, batch: Mapping[str, Any]) -> int | None:
        """Valid positions of a batch, before any forward; None where only the user's function can tell.

        Raises:
            InputError: no labels; a model of no known kind.
        """
        if self.kind == "custom":
            return None
        if self.kind is None:
            raise InputError(
                "this model's class says no kind of loss (causal, masked, classification, conditional). Give "
                "Booster(loss=fn), with fn(outputs, batch) returning (sum, count)."
            )
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor):
            raise InputError(f"a batch needs 'labels' for a loss; got {sorted(batch)}. Or give Booster(loss=fn).")
        self._check_ranges(labels, batch.get("input_ids"))
        if self.kind == "causal":
            ids = batch.get("input_ids")
            if isinstance(ids, torch.Tensor) and labels.shape != ids.shape:
                raise InputError(
                    f"labels {list(labels.shape)} must have the shape of input_ids {list(ids.shape)}; they are "
                    f"shifted inside."
                )
            labels = labels[..., 1:]
        if self.kind == "conditional" and self.decoder_inputs is None and not _gives_decoder_inputs(batch):
            raise InputError(
                f"{self.name} has no method that makes decoder_input_ids from labels: give them in the batch."
            )
        return int((labels != IGNORED).sum())

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What the model is called with for this loss: no labels, but what it would have made of them."""
        given = {name: value for name, value in batch.items() if name not in ("labels", "return_dict")}
        if self.kind == "conditional" and not _gives_decoder_inputs(batch):
            assert self.decoder_inputs is not None
            given["decoder_input_ids"] = self.decoder_inputs(batch["labels"])
        return given

    def _check_ranges(self, labels: torch.Tensor, ids: Any) -> None:
        """A label or an id outside the vocabulary would count as a token of no rank: a wrong number, not an error."""
        if labels.is_floating_point():
            raise InputError(
                f"labels are class numbers, an integer tensor; got {labels.dtype}. Or give Booster(loss=fn)."
            )
        for name, value, size in (("labels", labels, self.classes), ("input_ids", ids, self.ids)):
            if size is None or not isinstance(value, torch.Tensor) or not value.numel():
                continue
            valid = value[value != IGNORED] if name == "labels" else value
            if valid.numel() and not 0 <= int(valid.min()) <= int(valid.max()) < size:
                raise InputError(f"{name} must be in 0..{size - 1}; got {int(valid.min())}..{int(valid.max())}.")

    def sums(self, outputs: Any, batch: Mapping[str, Any], world: World) -> Sums:
        """Sum of losses and count of one micro-batch.

        Communicates: for a vocabulary cut over tp, one all_gather of 2 numbers a token.
        """
        labels = batch.get("labels")
        if self.function is not None:
            return self._custom(outputs, batch)
        assert isinstance(labels, torch.Tensor)
        logits = outputs.logits
        if self.kind == "classification":
            wide = torch.promote_types(logits.dtype, torch.float32)
            labels = _fitted(labels, logits)
            flat = logits.to(wide).reshape(-1, logits.shape[-1])
            losses = nn.functional.cross_entropy(flat, labels.reshape(-1), reduction="sum", ignore_index=IGNORED)
            return Sums(losses, (labels != IGNORED).sum(), {})
        aligned = shift(labels) if self.kind == "causal" else labels
        aligned = _fitted(aligned, logits)
        vocabulary = self.vocabulary or logits.shape[-1]
        axes = "tp" if logits.shape[-1] != vocabulary else ()  # a whole vocabulary: this rank alone
        losses = cross_entropy(logits, aligned, world, axes, vocabulary)
        return Sums(losses.sum(), (aligned != IGNORED).sum(), {})

    def extra(self, outputs: Any) -> torch.Tensor | None:
        """The accepted auxiliary loss of one share."""
        if not self.router:
            return None
        auxiliary = getattr(outputs, "aux_loss", None)
        return None if auxiliary is None else self.router * auxiliary

    def _custom(self, outputs: Any, batch: Mapping[str, Any]) -> Sums:
        assert self.function is not None
        labels = batch.get("labels")
        given = dict(batch)
        if isinstance(labels, torch.Tensor) and labels.dim() >= 2:
            given["shift_labels"] = shift(labels)
        made = self.function(outputs, given)
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.Tensor):
            raise InputError("loss=fn returns (sum, count) or (sum, count, {name: (sum, count)}), with sum a tensor.")
        if made[0].dim():
            raise InputError(f"loss=fn returns a sum, a tensor without dims; got shape {list(made[0].shape)}.")
        return Sums(made[0], made[1], dict(made[2]) if len(made) == 3 else {})


def _gives_decoder_inputs(batch: Mapping[str, Any]) -> bool:
    return any(batch.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))


def _fitted(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    if labels.shape != logits.shape[:-1]:
        raise RefusedError(
            f"logits {list(logits.shape)} are not [rows, length, vocabulary] of labels {list(labels.shape)}."
        )
    return labels.to(logits.device)


class GlobalMean(torch.autograd.Function):
    """This rank's sum of losses to the mean over all ranks' valid positions; backward for a mean over dp."""

    @staticmethod
    def forward(
        ctx: Any, total: torch.Tensor, count: float, factor: int, world: World, axes: tuple[str, ...]
    ) -> torch.Tensor:
        ctx.scale = factor / count
        return world.all_reduce(total.detach().reshape(1), axes, "loss of a call", fresh=True)[0] / count

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return dy * ctx.scale, None, None, None, None
