"""Training that stops, is saved, and goes on under another plan."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import lindos
from lindos.hf.twin import batch, twin, twin_config

PLANS = {
    "one": (1, lindos.DDP()),
    "dp2": (2, lindos.DDP()),
    "tp2": (2, lindos.HybridParallel(tp=2)),
    "tp4": (4, lindos.HybridParallel(tp=4)),
    "dp2xtp2": (4, lindos.HybridParallel(tp=2)),
}
ZERO = {"zero1": (2, lindos.LowLevelZero()), "zero2xtp2": (4, lindos.LowLevelZero(stage=2, tp=2))}
CONFIG: dict[str, Any] = {"heads": 8, "kv_heads": 2, "vocabulary": 131}


class Rows(torch.utils.data.Dataset):
    """Rows that know their number, so that the order can be read."""

    def __init__(self, config: Any, count: int = 37) -> None:
        self.rows = batch(config, count, 10, seed=3)

    def __len__(self) -> int:
        return self.rows["input_ids"].shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**{name: value[index] for name, value in self.rows.items()}, "number": torch.tensor(index)}


def run_of(plugin: Any, dtype: torch.dtype, kind: str = "llama", tied: bool = False) -> tuple:
    words = {k: v for k, v in CONFIG.items() if kind != "gpt2" or k != "kv_heads"}
    model = twin(twin_config(kind, **words, tied=tied), seed=1, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    booster = lindos.Booster(plugin, max_norm=1.0)
    dp = booster.mesh.size("dp")
    loader = DataLoader(Rows(model.config), batch_size=8 // dp, shuffle=True)
    return booster, *booster.boost(model, optimizer, loader, scheduler)


def steps(booster: Any, loader: Any, count: int) -> tuple[list[float], list[list[int]]]:
    """`count` steps over epochs as they come: losses, and the numbers of the rows that this rank took."""
    losses: list[float] = []
    numbers: list[list[int]] = []
    while len(losses) < count:
        for item in loader:
            labels = item["labels"]
            numbers.append([n for n, row in zip(item.pop("number").tolist(), labels) if bool((row != -100).any())])
            losses.append(booster.step(item).loss)
            if len(losses) == count:
                break
    return losses, numbers


def start_and_save(world: Any, plugin: Any, path: str, dtype: torch.dtype, before: int, after: int) -> dict[str, Any]:
    """Train, save, and go on without stopping."""
    booster, model, _, loader, _ = run_of(plugin, dtype)
    steps(booster, loader, before)
    booster.save(path)
    losses, numbers = steps(booster, loader, after)
    return {"losses": losses, "numbers": numbers, "weights": weights(booster, model)}


def load_and_go_on(world: Any, plugin: Any, path: str, dtype: torch.dtype, after: int) -> dict[str, Any]:
    booster, model, _, loader, _ = run_of(plugin, dtype)
    booster.load(path)
    losses, numbers = steps(booster, loader, after)
    return {"losses": losses, "numbers": numbers, "weights": weights(booster, model)}


def weights(booster: Any, model: Any) -> dict[str, torch.Tensor]:
    return {name: booster.full(name) for name, _ in model.named_parameters()}


def only_load(world: Any, plugin: Any, path: str, kind: str = "llama", weights_only: bool = False) -> float:
    booster, model, *_ = run_of(plugin, torch.float64, kind)
    booster.load(path, weights_only=weights_only)
    return float(booster.full(next(name for name, _ in model.named_parameters())).sum())


def save_without_room(world: Any, plugin: Any, path: str) -> None:
    """The last rank may write no file larger than 20 kB: a disk that fills up in the middle of a save."""
    booster, *_ = run_of(plugin, torch.float64)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == world.size - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        booster.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def export_it(world: Any, plugin: Any, path: str, kind: str, tied: bool, dtype: Any = None) -> dict[str, torch.Tensor]:
    booster, model, *_ = run_of(plugin, torch.float32, kind, tied)
    booster.export(path, dtype=dtype)
    return weights(booster, model)


def export_without_room(world: Any, plugin: Any, path: str) -> None:
    booster, *_ = run_of(plugin, torch.float32)
    booster.full("lm_head.weight")  # the mailboxes are files too: they must be there before the limit
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        booster.export(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_again_and_again(world: Any, plugin: Any, folder: str) -> None:
    """Saves step-1, step-2, ... until it is killed; says through a file that it has begun."""
    booster, *_ = run_of(plugin, torch.float64)
    start = len([p for p in os.listdir(folder) if p.startswith("step-")])
    for number in range(start, start + 1000):
        booster.save(Path(folder) / f"step-{number:06d}")
        if world.rank == 0:
            Path(folder, "going").touch()


def kill_at(world: Any, plugin: Any, folder: str, after_seconds: float) -> None:
    """Like the above, with a thread that kills this rank after a while."""
    import threading

    timer = threading.Timer(after_seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
    timer.start()
    try:
        save_again_and_again(world, plugin, folder)
    finally:
        timer.join()  # its peer died first: it dies as well, in this job and not in the next
