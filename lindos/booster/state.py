"""What a checkpoint holds of a run, and how it is taken up again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lindos.booster.calls import Calls
from lindos.booster.compose import Plan
from lindos.booster.loader import Loader
from lindos.checkpoint import load as loading
from lindos.checkpoint import save as saving
from lindos.checkpoint.save import Piece
from lindos.core.errors import CheckpointError, InputError, LindosError, RefusedError
from lindos.core.layout import Layout
from lindos.hf import models


@dataclass
class Parts:
    """The objects whose state a checkpoint holds besides the weights."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    loader: Loader | None
    calls: Calls


def save(path: str | Path, plan: Plan, parts: Parts) -> None:
    """Masters (weights are their exact rounding), optimizer state, buffers, scheduler, seed, step and loader cursor."""
    error: LindosError | None = None
    pieces: list[Piece] = []
    facts: dict[str, Any] = {}
    try:
        if plan.data.pending or plan.data.reduced:
            raise InputError("save between steps: gradients that are not stepped yet are not part of a checkpoint.")
        pieces = [*_weights(plan, parts), *_states(plan, parts)]
        facts = _facts(plan, parts)
    except LindosError as found:
        error = found
    plan.world.agree(error, "save")
    saving.save(path, pieces, facts, plan.world)


def load(path: str | Path, plan: Plan, parts: Parts, weights_only: bool) -> None:
    """Fill weights, then optimizer state, then everything that is no tensor."""
    error: LindosError | None = None
    manifest: dict[str, Any] = {}
    pieces: list[Piece] = []
    states: list[Piece] = []
    try:
        manifest = loading.manifest_of(path)
        pieces = _weights(plan, parts)
        if not weights_only:
            if plan.data.pending or plan.data.reduced:
                raise InputError("load between steps: call optimizer.zero_grad() first.")
            _check_facts(manifest, plan, parts, Path(path))
            states = _wanted_states(manifest, plan, parts)
    except LindosError as found:
        error = found
    plan.world.agree(error, "load")
    loading.load(path, manifest, [*pieces, *states], plan.world)
    plan.data.publish(frozen=True)
    if not weights_only:
        _take_up(manifest, plan, parts, states)


def _weights(plan: Plan, parts: Parts) -> list[Piece]:
    pieces = [
        Piece(e.name, "parameter", plan.ledger.kept(e.name), plan.data.value(e.name))
        for e in plan.ledger.of("parameter")
    ]
    for name, buffer in models.persistent_buffers(parts.model).items():
        pieces.append(Piece(name, "buffer", Layout(tuple(buffer.shape)), buffer))
    return pieces


def _states(plan: Plan, parts: Parts) -> list[Piece]:
    """Optimizer state of the shape of its parameter is cut as it is; of another shape it is whole or refused."""
    pieces = []
    for name, state in _by_name(plan, parts):
        layout = plan.ledger.kept(name)
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                continue
            if value.shape == plan.data.value(name).shape:
                pieces.append(Piece(f"{name}/{key}", "state", layout, value))
            elif not layout.cuts:
                pieces.append(Piece(f"{name}/{key}", "state", Layout(tuple(value.shape)), value))
            else:
                raise RefusedError(
                    f"optimizer state {key!r} of {name!r} has shape {list(value.shape)}, not the parameter's, and the "
                    "parameter is split: it cannot be saved exactly. Use an elementwise optimizer (AdamW, SGD)."
                )
    return pieces


def _by_name(plan: Plan, parts: Parts) -> list[tuple[str, dict[str, Any]]]:
    if parts.optimizer is None:
        return []
    return [(n, parts.optimizer.state[p]) for n, p in plan.data.shards.items() if p in parts.optimizer.state]


def _facts(plan: Plan, parts: Parts) -> dict[str, Any]:
    scalars = {
        name: {key: _scalar(v) for key, v in state.items() if not torch.is_tensor(v) or v.dim() == 0}
        for name, state in _by_name(plan, parts)
    }
    facts = {
        "step": parts.calls.step,
        "seed": plan.world.seed,
        "world_size": plan.world.size,
        "mesh": str(plan.world.mesh),
        "groups": _groups(plan, parts),
        "scalars": scalars,
        "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
        "loader": None if parts.loader is None else parts.loader.cursor(),
        "versions": {"torch": torch.__version__, "transformers": models.version()},
    }
    try:
        json.dumps(facts)
    except TypeError as error:
        raise InputError(
            f"the state of the scheduler or the optimizer's groups is no JSON ({error}); no pickle is written."
        ) from None
    return facts


def _scalar(value: Any) -> list[Any]:
    """A number and what it is: a dtype of a tensor without dims, or a plain number."""
    return [value.item(), str(value.dtype).removeprefix("torch.")] if torch.is_tensor(value) else [value, ""]


def _groups(plan: Plan, parts: Parts) -> list[dict[str, Any]]:
    names = {id(shard): name for name, shard in plan.data.shards.items()}
    groups = []
    for group in parts.optimizer.param_groups if parts.optimizer else ():
        made = {key: float(v) if torch.is_tensor(v) else v for key, v in group.items() if key != "params"}
        groups.append({**made, "params": [names[id(p)] for p in group["params"]]})
    return groups


def _check_facts(manifest: dict[str, Any], plan: Plan, parts: Parts, path: Path) -> None:
    ours, theirs = _groups(plan, parts), manifest["groups"]
    if parts.optimizer is not None:
        if not theirs:
            raise CheckpointError(f"{path} holds no optimizer. Load it with weights_only=True.")
        if len(ours) != len(theirs):
            raise CheckpointError(f"{path} has {len(theirs)} optimizer groups; this optimizer has {len(ours)}.")
        for i, (mine, saved) in enumerate(zip(ours, theirs)):
            if sorted(mine["params"]) != sorted(saved["params"]):
                name = sorted(set(mine["params"]) ^ set(saved["params"]))[0]
                raise CheckpointError(f"{path}: {name!r} is in optimizer group {i} on one side only.")
    if (parts.scheduler is None) != (manifest["scheduler"] is None):
        raise CheckpointError(
            f"{path} was saved {'without' if parts.scheduler else 'with'} a scheduler; this run is "
            f"{'with' if parts.scheduler else 'without'} one."
        )
    if (
        parts.loader is not None
        and manifest["loader"] is not None
        and manifest["loader"]["count"] != parts.loader.order.count
    ):
        raise CheckpointError(
            f"{path}: its loader had {manifest['loader']['count']} rows; this one has {parts.loader.order.count}."
        )


def _wanted_states(manifest: dict[str, Any], plan: Plan, parts: Parts) -> list[Piece]:
    """Local tensors for the states that the checkpoint holds, still to be filled."""
    pieces = []
    if parts.optimizer is None:
        return pieces
    for full, facts in manifest["tensors"].items():
        if facts["kind"] != "state":
            continue
        name, _, _ = full.rpartition("/")
        entry = plan.ledger.parameter(name)
        shape, like = tuple(facts["shape"]), plan.data.value(entry.name)
        layout = plan.ledger.kept(entry.name) if shape == entry.shape else Layout(shape)
        local = torch.zeros(
            layout.local_shape(plan.world.mesh), dtype=getattr(torch, facts["dtype"]), device=like.device
        )
        pieces.append(Piece(full, "state", layout, local))
    return pieces


def _take_up(manifest: dict[str, Any], plan: Plan, parts: Parts, states: list[Piece]) -> None:
    if parts.optimizer is not None:
        for mine, saved in zip(parts.optimizer.param_groups, manifest["groups"]):
            mine.update(
                {k: tuple(v) if isinstance(mine.get(k), tuple) else v for k, v in saved.items() if k != "params"}
            )
        _take_up_states(manifest, plan, parts.optimizer, states)
    if parts.scheduler is not None:
        parts.scheduler.load_state_dict(manifest["scheduler"])
    if parts.loader is not None and manifest["loader"] is not None:
        parts.loader.move_to(manifest["loader"])
        parts.loader.order.seed = manifest["seed"]  # the order that the cursor is a place in
    parts.calls.step = manifest["step"]
    if parts.calls.dropout is not None:
        parts.calls.dropout.seed = manifest["seed"]


def _take_up_states(
    manifest: dict[str, Any], plan: Plan, optimizer: torch.optim.Optimizer, states: list[Piece]
) -> None:
    optimizer.state.clear()
    fused = {id(p): g.get("fused") or g.get("capturable") for g in optimizer.param_groups for p in g["params"]}
    for name, scalars in manifest["scalars"].items():
        shard = plan.data.shards[name]
        device = shard.device if fused.get(id(shard)) else torch.device("cpu")
        for key, value in scalars.items():
            number, dtype = value
            made = torch.tensor(number, dtype=getattr(torch, dtype), device=device) if dtype else number
            optimizer.state[shard][key] = made
    for piece in states:
        name, _, key = piece.name.rpartition("/")
        optimizer.state[plan.data.shards[name]][key] = piece.local
