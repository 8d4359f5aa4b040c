"""Booster: one small API over every plan. See docs for the contract; this file only joins the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lindos.booster import batch as cutting
from lindos.booster import state
from lindos.booster.calls import Calls
from lindos.booster.compose import Plan, compose
from lindos.booster.loader import Loader, over_dp
from lindos.booster.loss import ALLOWED, Loss, LossFunction
from lindos.booster.plugins import DDP, Plugin
from lindos.booster.precision import Precision
from lindos.booster.step import Result, Stepping
from lindos.comm.launch import current
from lindos.comm.world import World
from lindos.core.errors import InputError, LindosError, NumbersError, RefusedError, nearest
from lindos.core.mesh import Mesh
from lindos.hf import models, refuse
from lindos.hf.export import export as hf_export
from lindos.optim.norms import total_norm
from lindos.optim.optimizer import Optimizer
from lindos.parallel.dropout import refuse_unkeyed
from lindos.parallel.whole import whole


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over the valid positions of all batches of all ranks; the same on every rank."""

    loss: float
    count: int


class Booster:
    """Spreads a model over a plan and trains it as one process would.

    Args:
        plugin: the plan: `DDP()`, `LowLevelZero()`, `Gemini()`, `HybridParallel()`.
        precision: "fp32", "bf16" or "fp16".
        max_norm: clip the norm of the whole gradient to this, or None.
        micro_batches: pieces that `step` cuts a batch into.
        loss: `fn(outputs, batch) -> (sum, count)` or `(sum, count, {name: (sum, count)})`; default by the model's kind.
        allow: "router_aux_loss": it may depend on how a batch is cut; "whole": most of a model may stay whole under tp.

    Raises:
        InputError: an option that does not exist or cannot be; the axes do not divide the world.
        RefusedError: an option that is not served yet.

    Example:
        booster = lindos.Booster(lindos.HybridParallel(tp=2), precision="bf16", max_norm=1.0)
        model, optimizer, loader, scheduler = booster.boost(model, optimizer, loader, scheduler)
        for batch in loader:
            print(booster.step(batch).loss)
    """

    def __init__(
        self,
        plugin: Plugin | None = None,
        *,
        precision: str = "fp32",
        max_norm: float | None = None,
        micro_batches: int = 1,
        loss: LossFunction | None = None,
        allow: tuple[str, ...] = (),
    ) -> None:
        self.plugin = DDP() if plugin is None else plugin
        if not isinstance(self.plugin, Plugin):
            raise InputError(f"plugin is one of DDP(), LowLevelZero(), Gemini(), HybridParallel(); got {plugin!r}.")
        self.plugin.refuse_unserved()
        self.precision = Precision.of(precision)
        if max_norm is not None and not max_norm > 0:
            raise InputError(f"max_norm must be positive, or None for no clipping; got {max_norm!r}.")
        if not isinstance(micro_batches, int) or isinstance(micro_batches, bool) or micro_batches < 1:
            raise InputError(f"micro_batches must be an integer of at least 1; got {micro_batches!r}.")
        if loss is not None and not callable(loss):
            raise InputError(f"loss is a function (outputs, batch) -> (sum, count); got {loss!r}.")
        for name in (allow,) if isinstance(allow, str) else allow:
            if name not in ALLOWED:
                raise InputError(f"allow={name!r}: {nearest(name, ALLOWED)}.")
        self.max_norm, self.micro_batches, self._function = max_norm, micro_batches, loss
        self._allow = (allow,) if isinstance(allow, str) else tuple(allow)
        self._world: World = current()
        self.mesh: Mesh = self.plugin.mesh(self._world.size, self._world.rank)
        self._plan: Plan | None = None
        self._optimizer: Optimizer | None = None
        self._inner: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        self._loader: Any = None
        self._settled = False
        self._observe: Callable[[], None] | None = None  # called with this step's gradients reduced and not yet clipped

    # --- boost --------------------------------------------------------------------------------------------------------

    def boost(
        self, model: nn.Module, optimizer: Any = None, loader: Any = None, scheduler: Any = None
    ) -> tuple[Any, ...]:
        """Apply the plan. The model is changed in place and returned; errors come on all ranks before any change.

        Returns:
            model, optimizer, loader, scheduler: what was None stays None.

        Raises:
            InputError: weights differ over ranks; an optimizer of other parameters or with state; a loader that
                cannot be made equal on all ranks.
            RefusedError: a model that the plan cannot run exactly.
        """
        if self._plan is not None:
            raise InputError("one booster boosts one model; make another Booster for another model.")
        error: LindosError | None = None
        loss = rebuilt = None
        try:
            loss = Loss(model, self._function, self._allow, models.vocabulary_of(model))
            rebuilt = over_dp(loader, self.mesh.coordinate("dp"), self.mesh.size("dp"), self._world.seed)
            _refuse_batch_norm(model)
            refuse_unkeyed(model)
            refuse.contradictions(model)
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise RefusedError(
                    "ReduceLROnPlateau steps on a metric, which step() does not give it; call it yourself."
                )
        except LindosError as found:
            error = found
        self._world.agree(error, "boost options")
        assert loss is not None
        plan = self._plan = compose(model, optimizer, self.plugin, self.precision, self._world, self._allow)
        self.mesh = plan.world.mesh
        self._model, self._scheduler, self._loader = model, scheduler, rebuilt
        self._calls = Calls(model, plan, loss, self.precision.cast)
        # A model that comes in eval mode as a whole (from_pretrained gives that) is to be trained; parts of one that is
        # in
        # training mode are in eval mode on purpose.
        self._resting = [m for m in model.modules() if not m.training] if model.training else []
        self._stepping = Stepping(plan, self._calls, self.micro_batches)
        if optimizer is not None:
            self._inner = optimizer
            self._optimizer = Optimizer(optimizer, self._before_step, self._after_step, plan.data.forget)
        _refuse_local_state(model, plan)
        return model, self._optimizer, rebuilt, scheduler

    # --- training -----------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Result:
        """Forward, backward, reduce, clip, optimizer step, scheduler step and zero_grad of one batch.

        Args:
            batch: dict; tensors whose dim 0 is the batch are cut into micro_batches, others go whole to each.

        Raises:
            InputError: on all ranks, before any gradient exists: a bad batch, different batches on ranks of one dp
                coordinate, no valid position.
            NumbersError: the loss or gradient is not finite; weights are as before.
        """
        plan = self._boosted("step")
        if self._inner is None:
            raise InputError("step(batch) needs an optimizer: booster.boost(model, optimizer).")
        self._train_mode()
        joined, totals = self._stepping.gradients(batch)
        self._calls.step += 1
        loss, norm, count, metrics = self._stepping.settle(joined, totals)
        self._stepping.check_finite(loss, norm, batch, self._calls.step)
        if self._observe is not None:
            self._observe()
        self._stepping.clip(norm, self.max_norm)
        lr = self._inner.param_groups[0].get("lr")
        plan.data.attach()
        self._inner.step()
        plan.data.publish()
        if self._scheduler is not None:
            self._scheduler.step()
        plan.data.forget()
        return Result(loss, norm, count, None if lr is None else float(lr), False, metrics)

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        """Backward of your own loop; with `last`, gradients are reduced while it runs.

        Args:
            last: False for all but the last backward before `optimizer.step()`.

        Communicates: with last, one all_reduce of every chunk over dp (and what the ledger names), in a fixed order.
        """
        plan = self._boosted("backward")
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            raise InputError("booster.backward(loss) takes a loss with a graph, a tensor without dims.")
        plan.data.open(last)
        try:
            loss.backward()
        except BaseException:
            plan.data.abandon()
            raise
        plan.data.close()
        self._settled = False

    def evaluate(self, batches: Iterable[Any]) -> Evaluation:
        """Mean loss over batches, without gradients and dropout; ranks may have different numbers of them, also none.

        Communicates: per batch what the model's axes do; at the end one all_reduce of 2 numbers over dp and sp.
        """
        plan = self._boosted("evaluate")
        modes = {module: module.training for module in self._model.modules()}
        total = torch.zeros(2, dtype=torch.float64, device=plan.world.device)
        error: InputError | None = None
        self._model.eval()
        try:
            with torch.no_grad():
                for batch in batches:
                    self._check_evaluated(batch)
                    sums, _ = self._calls.sums(cutting.move(batch, plan.world.device))
                    total += torch.stack(
                        [sums.total.double(), torch.as_tensor(sums.count, dtype=torch.float64).to(total)]
                    )
        except InputError as found:
            error = found
        finally:
            for module, training in modes.items():
                module.training = training
        plan.world.agree(error, "evaluate")
        plan.world.all_reduce(total, ("dp", "sp"), "evaluate")
        if total[1] == 0:
            raise InputError("evaluate(batches) found no valid position on any rank.")
        return Evaluation(float(total[0] / total[1]), int(total[1]))

    def _check_evaluated(self, batch: Any) -> None:
        """A batch is good, and the same, on all ranks of this tensor-parallel group, or all of them raise."""
        error: InputError | None = None
        try:
            cutting.rows_of(batch, 1)
            self._calls.loss.counted(batch)
        except InputError as found:
            error = found
        world = self._boosted("evaluate").world
        if world.mesh.size("tp") > 1:
            mine = torch.tensor([[error is not None, 0 if error else cutting.digest(batch)]], dtype=torch.int64)
            seen = world.all_gather(mine.to(world.device), "tp", 0, "evaluated batch").tolist()
            if error is None and len({tuple(line) for line in seen}) > 1:
                error = InputError(
                    "ranks of one dp coordinate must evaluate the same good batches; another has a bad one."
                )
        if error is not None:
            raise error

    def _train_mode(self) -> None:
        """Training mode for the model, as it was at boost: a module that you froze in eval mode stays there."""
        if not self._model.training:
            self._model.train()
        for module in self._resting:
            module.eval()
        _refuse_batch_norm(self._model)

    def _before_step(self) -> bool:
        """For optimizer.step() of the ordinary loop: gradients are whole, finite and clipped."""
        plan = self._boosted("optimizer.step")
        data = plan.data
        if data.stray:
            raise InputError(
                f"{data.stray!r} got a gradient from a plain loss.backward(), which is not reduced over ranks. "
                "Call booster.backward(loss) instead."
            )
        if data.pending:
            raise InputError("gradients are not reduced: the last backward before optimizer.step() needs last=True.")
        if not data.reduced:
            raise InputError("there are no gradients to step with. Call booster.backward(loss) first.")
        if not self._settled:
            layouts = ((plan.ledger.kept(name), gradient) for name, gradient in data.gradients())
            norm = total_norm(layouts, plan.world)
            if not torch.isfinite(norm):
                raise NumbersError(
                    f"the gradient norm is {float(norm)}. The weights are as they were before this step."
                )
            self._stepping.clip(norm, self.max_norm)
            self._settled = True
        data.attach()
        return True

    def _after_step(self) -> None:
        self._boosted("step").data.publish()
        self._calls.step += 1
        self._calls.seen_rows = 0

    # --- state --------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a checkpoint that any plan and world size can load; complete or absent.

        Raises:
            CheckpointError: the path exists; the disk is full or fails (path, errno, rank, bytes).
        """
        state.save(path, self._boosted("save"), self._parts())

    def load(self, path: str | Path, *, weights_only: bool = False) -> None:
        """Take up a checkpoint of any plan and world size: weights, optimizer, scheduler, step, loader cursor.

        Raises:
            CheckpointError: incomplete, damaged (file and tensor named) or of another model (first tensor named).
        """
        state.load(path, self._boosted("load"), self._parts(), weights_only)

    def export(self, path: str | Path, *, dtype: Any = None, tokenizer: Any = None) -> None:
        """Write a Hugging Face folder: tied tensors once, vocabularies unpadded, names as on disk, and the config.

        Args:
            dtype: of the weights; default the config's.
            tokenizer: saved beside them when given.
        """
        plan = self._boosted("export")
        shapes = {entry.name: entry.shape for entry in plan.ledger.of("parameter")}
        shapes |= {name: tuple(buffer.shape) for name, buffer in models.persistent_buffers(self._model).items()}
        hf_export(path, self._model, shapes, self.full, plan.world, (dtype, tokenizer))

    def full(self, name: str) -> torch.Tensor:
        """The whole value of a parameter (its master) or buffer, on every rank.

        Communicates: all_gather over the axes that cut it.
        """
        plan = self._boosted("full")
        buffers = models.persistent_buffers(self._model)
        if name in buffers:
            return buffers[name].detach().clone()
        entry = plan.ledger.parameter(name)
        return whole(plan.data.value(entry.name), plan.ledger.kept(entry.name), plan.world, name)

    def gradient(self, name: str) -> torch.Tensor:
        """The whole reduced gradient of a parameter, on every rank.

        Communicates: all_gather over the axes that cut it.

        Raises:
            InputError: there is none now: between `backward` and `zero_grad` there is.
        """
        plan = self._boosted("gradient")
        entry = plan.ledger.parameter(name)
        if not entry.trained:
            raise InputError(f"parameter {name!r} is not trained: it requires no gradient or is in no optimizer group.")
        if not plan.data.reduced:
            raise InputError("there is no reduced gradient now. Call booster.backward(loss) first.")
        return whole(plan.data.gradient(entry.name), plan.ledger.kept(entry.name), plan.world, name)

    def describe(self) -> str:
        """The plan as text: mesh, dtypes, and where every tensor lies."""
        if self._plan is None:
            return f"{self.plugin.name} over {self.mesh}\n{self.precision.text()}\nno model boosted yet"
        return "\n".join(
            [
                f"{self.plugin.name} over {self.mesh}",
                self.precision.text(),
                *self._notes(),
                self._plan.ledger.text(self.mesh),
            ]
        )

    def _notes(self) -> list[str]:
        notes = []
        recompute, shared = self._boosted("describe").recompute, self._boosted("describe").data.text()
        notes += [shared] if shared else []
        if recompute is not None:
            notes.append(recompute.text())
        attention = models.attention_of(self._model)
        if attention:
            notes.append(f"attention {attention}")
        if self._calls.dropout is not None:
            notes.append(
                "dropout keyed by (seed, step, place, sample, token, feature); attention with dropout is eager"
            )
        tensor = self._plan.tensor if self._plan else None
        if tensor is not None and self._plan is not None:
            notes += tensor.left_text(self._plan.ledger)
        return notes

    def _parts(self) -> state.Parts:
        loader = self._loader if isinstance(self._loader, Loader) else None
        return state.Parts(self._model, self._inner, self._scheduler, loader, self._calls)

    def _boosted(self, what: str) -> Plan:
        if self._plan is None:
            raise InputError(f"{what} needs a boosted model: call booster.boost(model, ...) first.")
        return self._plan


def _refuse_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise RefusedError(
                f"module {name!r} is a BatchNorm in training: its statistics are of one share of the batch, not "
                f"of all. "
                "Put it in eval mode, or use GroupNorm or LayerNorm."
            )


def _refuse_local_state(model: nn.Module, plan: Plan) -> None:
    """state_dict of a model that is split would be one rank's part under whole names."""
    if any(entry.at_rest.cuts for entry in plan.ledger.of("parameter")):

        def refuse(*_: Any, **__: Any) -> None:
            raise InputError(
                "the model is split over ranks: its state_dict would hold this rank's parts under whole names. Use "
                "booster.save(path), booster.export(path) or booster.full(name)."
            )

        model.register_state_dict_pre_hook(refuse)
        model.register_load_state_dict_pre_hook(refuse)
    elif any(chunk.apart for chunk in plan.data.chunks):

        def masters(*_: Any, **__: Any) -> None:
            raise InputError(
                "load_state_dict would change the bf16 copies and not their masters. Use booster.load(path)."
            )

        model.register_load_state_dict_pre_hook(masters)
