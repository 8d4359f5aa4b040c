"""Jobs about what blocks keep for backward; they run on the ranks of the pool."""

from __future__ import annotations

from typing import Any

import torch
from booster_jobs import WIDE, joined_batch, share
from torch import nn

import lindos
from lindos.comm.record import record
from lindos.core.errors import LindosError
from lindos.hf.twin import twin, twin_config
from lindos.memory.saved import saved_bytes


def config_of(kind: str, options: dict[str, Any], layers: int = 2) -> Any:
    words = {} if kind == "mamba" else {k: v for k, v in WIDE.items() if kind not in ("gpt2", "opt") or k != "kv_heads"}
    config = twin_config(kind, layers=layers, **words)
    for name, value in options.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    return config


def boosted(plugin: Any, config: Any, dtype: torch.dtype = torch.float64, **options: Any) -> tuple:
    attention = config._attn_implementation
    model = twin(config, seed=1, dtype=dtype).train()
    if attention == "eager":
        model.set_attn_implementation(attention)
    booster = lindos.Booster(plugin, **options)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


def trained(world: Any, plugin: Any, kind: str, options: dict[str, Any], precision: str = "fp32") -> dict[str, Any]:
    """Two steps by step(), two by the ordinary loop, an evaluation; all numbers, and what crossed tp."""
    results: dict[str, Any] = {}
    for way in ("step", "loop"):
        config = config_of(kind, options)
        dtype = torch.float64 if precision == "fp32" else torch.float32
        pieces = 2 if way == "step" else 1
        booster, model, optimizer = boosted(plugin, config, dtype, precision=precision, micro_batches=pieces)
        losses, gradients = [], []
        with record() as seen:
            for i in range(2):
                mine = share(joined_batch(config, i), booster.mesh)
                if way == "step":
                    losses.append(booster.step(mine).loss)
                    continue
                loss = model(**mine).loss
                booster.backward(loss)
                losses.append(loss.item())
                gradients.append({n: booster.gradient(n) for n, _ in model.named_parameters()})
                optimizer.step()
                optimizer.zero_grad()
        calls = [(c.op, c.name, c.received_bytes) for c in seen.calls if c.axes == ("tp",) and "whole" not in c.name]
        evaluated = booster.evaluate([share(joined_batch(config, 5), booster.mesh)]).loss
        weights = {n: booster.full(n) for n, _ in model.named_parameters()}
        results[way] = {"losses": losses, "gradients": gradients, "evaluated": evaluated, "weights": weights}
        results[f"{way} calls"] = calls
    return results


def saved(world: Any, plugin: Any, kind: str, options: dict[str, Any], shapes: list[tuple[int, int]]) -> list[Any]:
    """Saved bytes of one forward for each (layers, length), after a first forward that budgets are divided by."""
    found = []
    for layers, length in shapes:
        config = config_of(kind, options, layers)
        booster, model, _ = boosted(plugin, config, torch.float32)
        batch = share(joined_batch(config, 0, length=length), booster.mesh)
        for _ in range(2):
            with saved_bytes(model.parameters()) as counted:
                loss = model(**batch).loss
            now = (counted.device_bytes, counted.host_bytes)
            booster.backward(loss)
        found.append(now)
    return found


def widths(config: Any, ranks: int = 1) -> dict[str, int]:
    """Features of a llama on one of `ranks` tensor ranks."""
    head = config.head_dim
    return {
        "hidden": config.hidden_size,
        "query": head * config.num_attention_heads // ranks,
        "key_value": head * config.num_key_value_heads // ranks,
        "inner": config.intermediate_size // ranks,
        "heads": config.num_attention_heads // ranks,
    }


def refused(world: Any, plugin: Any) -> str:
    """The message of the error of one step."""
    try:
        config = config_of("llama", {})
        booster, _, _ = boosted(plugin, config, torch.float32)
        booster.step(share(joined_batch(config, 0, rows=8 + 4 * world.rank), booster.mesh))
    except LindosError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Layer(nn.Module):
    """A block with everything that is hard to repeat: its own random numbers, state, and writes in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.inner(x)
        y += torch.rand_like(y)  # in place, and drawn by torch
        y = torch.tanh(y) * float(self.calls)
        return x + self.outer((torch.sigmoid(y) * y).mul_(0.5))


class Stack(nn.Module):
    """Two stacks of layers; the second is called twice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Layer(width) for _ in range(2)])
        self.decoder = nn.ModuleList([Layer(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.encoder, *self.decoder, *self.decoder):
            x = layer(x)
        return x


def hard(world: Any, plugin: Any) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """Loss, gradients and call counts of `Stack`."""
    torch.manual_seed(3)
    model = Stack().double()
    booster = lindos.Booster(plugin)
    model, *_ = booster.boost(model)
    torch.manual_seed(world.rank)
    loss = model(torch.randn(4, 5, 8, dtype=torch.float64)).square().mean()
    booster.backward(loss)
    gradients = {n: booster.gradient(n) for n, _ in model.named_parameters()}
    return loss.item(), gradients, [float(b) for n, b in model.named_buffers()]


def compiled(world: Any, plugin: Any) -> dict[str, Any]:
    """Two steps of one shape: numbers, collectives over tp, and how many graphs were compiled for them."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    config = config_of("llama", {})
    booster, model, _ = boosted(plugin, config, torch.float32)
    with record() as seen:
        losses = [booster.step(share(joined_batch(config, i), booster.mesh)).loss for i in range(2)]
    return {
        "losses": losses,
        "weights": {n: booster.full(n) for n, _ in model.named_parameters()},
        "calls": [c.name for c in seen.calls if c.axes == ("tp",)],
        "graphs": counters["stats"]["unique_graphs"],
    }


def run_again(world: Any, plugin: Any, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two steps; with recompute, by the way of compiled blocks, whose code runs again, without compiling them."""
    config = config_of(kind, options)
    booster, model, _ = boosted(plugin, config, micro_batches=2)
    if booster._plan.recompute is not None:
        booster._plan.recompute.compiled = True
    losses = [booster.step(share(joined_batch(config, i), booster.mesh)).loss for i in range(2)]
    booster.backward(model(**share(joined_batch(config, 2), booster.mesh)).loss)
    gradients = {n: booster.gradient(n) for n, _ in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "weights": {n: booster.full(n) for n in gradients}}
