"""Jobs that run on the ranks of the pool; each returns small values to compare."""

from __future__ import annotations

from typing import Any

import torch

import lindos
from lindos.comm.record import record
from lindos.core.errors import LindosError
from lindos.hf.twin import batch, twin, twin_config

PLANS = {
    "one": (1, lindos.DDP()),
    "dp2": (2, lindos.DDP()),
    "tp2": (2, lindos.HybridParallel(tp=2)),
    "tp4": (4, lindos.HybridParallel(tp=4)),
    "dp2xtp2": (4, lindos.HybridParallel(tp=2)),
}
ZERO = {
    "zero1": (2, lindos.LowLevelZero()),
    "zero2": (2, lindos.LowLevelZero(stage=2)),
    "zero2xtp2": (4, lindos.LowLevelZero(stage=2, tp=2)),
    "zero1, 2 replicas": (4, lindos.LowLevelZero(zero_replicas=2)),
}
WIDE = {"heads": 8, "kv_heads": 2, "vocabulary": 131}


def model_of(kind: str = "llama", dtype: torch.dtype = torch.float64, **overrides: Any) -> torch.nn.Module:
    return twin(twin_config(kind, **{**WIDE, **overrides}), seed=1, dtype=dtype)


def joined_batch(config: Any, step: int, rows: int = 8, length: int = 12) -> dict[str, torch.Tensor]:
    return batch(config, rows, length, seed=50 + step)


def share(whole: dict[str, torch.Tensor], mesh: Any) -> dict[str, torch.Tensor]:
    n, i = mesh.size("dp"), mesh.coordinate("dp")
    return {name: value.chunk(n)[i] for name, value in whole.items()}


def boosted(
    plugin: Any, dtype: torch.dtype = torch.float64, lr: float = 0.1, kind: str = "llama", **options: Any
) -> tuple:
    model = model_of(kind, dtype, **options.pop("twin", {}))
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=lr)
    booster = lindos.Booster(plugin, **options)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def step_and_loop(world: Any, plugin: Any) -> dict[str, Any]:
    """Two steps by `step`, and the same two by the ordinary loop, with clipping."""
    results: dict[str, Any] = {}
    for way in ("step", "loop"):
        booster, model, optimizer = boosted(plugin, max_norm=0.5)
        losses = []
        for i in range(2):
            mine = share(joined_batch(model.config, i), booster.mesh)
            if way == "step":
                losses.append(booster.step(mine).loss)
            else:
                out = model(**mine)
                assert out.logits is None
                booster.backward(out.loss)
                results.setdefault("gradient", booster.gradient("model.norm.weight"))
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(out.loss))
        results[way] = (losses, {n: booster.full(n) for n, _ in model.named_parameters()})
    return results


def accumulated(world: Any, plugin: Any, first: bool = False) -> dict[str, torch.Tensor]:
    """Gradients of two backwards before one step; `first`: the first one is said to be the last, too."""
    booster, model, _ = boosted(plugin)
    for i, last in ((0, first), (1, True)):
        booster.backward(model(**share(joined_batch(model.config, i), booster.mesh)).loss, last=last)
    return {n: booster.gradient(n) for n, _ in model.named_parameters()}


def logits_and_own_loss(world: Any, plugin: Any) -> dict[str, Any]:
    """Whole, differentiable logits and a loss of the user's own with DDP's meaning."""
    booster, model, _ = boosted(plugin)
    mine = share(joined_batch(model.config, 0), booster.mesh)
    mine.pop("labels")
    logits = model(**mine).logits
    booster.backward(logits.square().mean())
    gradients = {n: booster.gradient(n) for n, _ in model.named_parameters()}
    return {"logits": logits.detach(), "gradients": gradients}


def micro_batches(world: Any, plugin: Any, pieces: int) -> tuple[float, float, dict[str, torch.Tensor]]:
    booster, model, _ = boosted(plugin, micro_batches=pieces)
    result = booster.step(share(joined_batch(model.config, 0, rows=15), booster.mesh))
    return result.loss, result.grad_norm, {n: booster.full(n) for n, _ in model.named_parameters()}


def bytes_of_step(world: Any, plugin: Any) -> dict[str, Any]:
    """Received elements of one step by axes and op, and what the closed forms need."""
    booster, model, _ = boosted(plugin, torch.float32)
    mine = share(joined_batch(model.config, 0), booster.mesh)
    booster.step(mine)
    with record() as seen:
        booster.step(mine)
    plan = booster._plan
    return {
        "calls": [(c.op, c.axes, c.name, c.elements, c.dtype.itemsize, c.received_bytes) for c in seen.calls],
        "chunks": [(chunk.group, chunk.size) for chunk in plan.data.chunks],
        "rows": mine["input_ids"].shape[0],
        "length": mine["input_ids"].shape[1],
        "hidden": model.config.hidden_size,
        "layers": model.config.num_hidden_layers,
        "resident": resident_bytes(model),
        "ledger": plan.ledger.local_bytes(["parameter"], plan.world.mesh),
        "padded": sum(chunk.size for chunk in plan.data.chunks) * 4,
    }


def resident_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Bytes of the model's parameters: of the views, and of the storages that exist."""
    views = sum(p.numel() * p.element_size() for p in model.parameters())
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return views, sum(storages.values())


def lazily(world: Any, plugin: Any, folder: str | None) -> dict[str, Any]:
    """Weights of a model built lazily, whole; and that nothing was allocated before boost."""
    if folder:
        model = lindos.from_pretrained(folder)
    else:
        from transformers import AutoModelForCausalLM

        with lindos.lazy():
            model = AutoModelForCausalLM.from_config(twin_config("llama", **WIDE))
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    booster = lindos.Booster(plugin)
    groups = optimizer.param_groups
    model, optimizer, *_ = booster.boost(model, optimizer)
    assert optimizer.param_groups is groups
    loss = booster.step(share(joined_batch(model.config, 0), booster.mesh)).loss
    return {"loss": loss, "weights": {n: booster.full(n) for n, _ in model.named_parameters()}}


def dropped(world: Any, plugin: Any, kind: str, options: dict[str, Any]) -> list[float]:
    """Losses of three steps with dropout everywhere the model has it."""
    words = {k: v for k, v in WIDE.items() if kind != "gpt2" or k != "kv_heads"}  # gpt2 has as many kv heads as heads
    config = twin_config(kind, **words)
    for name, value in options.items():
        outer, _, leaf = name.rpartition(".")
        owner = getattr(config, outer) if outer else config
        assert hasattr(owner, leaf)
        setattr(owner, leaf, value)
    model = twin(config, seed=1, dtype=torch.float64).train()
    booster = lindos.Booster(plugin)
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [booster.step(share(joined_batch(model.config, i), booster.mesh)).loss for i in range(3)]


def bf16_curve(world: Any, plugin: Any, precision: str) -> tuple[list[float], str, set[str]]:
    booster, model, _ = boosted(plugin, torch.float32, lr=0.05, precision=precision)
    losses = [booster.step(share(joined_batch(model.config, 0), booster.mesh)).loss for _ in range(8)]
    return losses, booster.describe(), {str(p.dtype) for p in model.parameters()}


def own_loss(world: Any, plugin: Any) -> tuple[float, dict[str, float], int, torch.Tensor]:
    """A loss function of the user's equal to the default one, with a metric."""

    def function(outputs: Any, batch: Any) -> Any:
        logits, labels = outputs.logits, batch["shift_labels"]
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        hits = (logits.argmax(-1) == labels)[labels != -100].sum()
        return total, (labels != -100).sum(), {"accuracy": (hits, (labels != -100).sum())}

    booster, model, _ = boosted(plugin, loss=function, micro_batches=2)
    result = booster.step(share(joined_batch(model.config, 0), booster.mesh))
    return result.loss, result.metrics, result.count, booster.full("model.norm.weight")


def evaluated(world: Any, plugin: Any) -> tuple[float, int, bool]:
    booster, model, _ = boosted(plugin)
    dp = booster.mesh.coordinate("dp")
    every = [joined_batch(model.config, i, rows=2 + i) for i in range(3)]
    mine = every if booster.mesh.size("dp") == 1 else (every if dp == 0 else [])
    before = booster.full("model.norm.weight")
    result = booster.evaluate(iter(mine))
    assert torch.equal(before, booster.full("model.norm.weight"))
    return result.loss, result.count, model.training


def routed(world: Any, plugin: Any) -> tuple[float, float]:
    """Mixtral with its router's loss accepted as the mean over shares, here equal shares."""
    config = twin_config("mixtral", **WIDE)
    config.output_router_logits = True
    model = twin(config, seed=1)
    booster = lindos.Booster(plugin, allow=("router_aux_loss",))
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result = booster.step(share(joined_batch(model.config, 0), booster.mesh))
    return result.loss, result.grad_norm


def two_models(world: Any, plugin: Any) -> list[float]:
    """Two boosters in one process do not meet."""
    first, second = boosted(plugin), boosted(plugin, kind="qwen3")
    return [
        booster.step(share(joined_batch(model.config, i), booster.mesh)).loss
        for i in range(2)
        for booster, model, _ in (first, second)
    ]


def bad(world: Any, plugin: Any, case: str) -> None:
    """One bad input on one rank, or the same on all."""
    last = world.rank == world.size - 1
    if case == "weights differ":
        model = model_of()
        if last:
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
        lindos.Booster(plugin).boost(model)
        return
    if case == "optimizer of other parameters":
        model = model_of()
        lindos.Booster(plugin).boost(model, torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1))
        return
    if case == "optimizer with state":
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        model(**joined_batch(model.config, 0)).loss.backward()
        optimizer.step()
        lindos.Booster(plugin).boost(model, optimizer)
        return
    if case == "options differ":
        lindos.Booster(lindos.DDP()).boost(model_of(layers=3 if last else 2))
        return
    booster, model, optimizer = boosted(plugin, micro_batches=2)
    batch_ = share(joined_batch(model.config, 0), booster.mesh)
    if case == "different batches" and last:
        batch_["input_ids"] = batch_["input_ids"] + 1
    if case == "fewer rows" and last:
        batch_ = {name: value[:1] for name, value in batch_.items()}
    if case == "no valid token":
        batch_["labels"] = torch.full_like(batch_["labels"], -100)
    if case == "odd shape" and last:
        batch_["position_ids"] = torch.zeros(3, 12, dtype=torch.long)
    if case == "evaluated rows" and last:
        batch_["labels"] = batch_["labels"][:, :3]
    if case == "evaluated rows":
        booster.evaluate([batch_])
    if case == "plain backward":
        model(**batch_).loss.backward()
        optimizer.step()
    if case == "nan":
        model.model.layers[1].register_forward_hook(lambda *_: _[2] * float("nan"))
    booster.step(batch_)


def zero_bytes(world: Any, plugin: Any, precision: str, micros: int) -> dict[str, Any]:
    """Bytes of one AdamW step's chunks, from the storages that exist; of the ledger; and received over dp."""
    options = {"optimizer": torch.optim.AdamW, "precision": precision, "micro_batches": micros}
    booster, model, optimizer = boosted(plugin, torch.float32, **options)
    rows = 3 * booster.mesh.size("dp")
    booster.step(share(joined_batch(model.config, 0, rows=rows), booster.mesh))
    with record() as seen:
        booster.step(share(joined_batch(model.config, 1, rows=rows), booster.mesh))
    plan = booster._plan
    chunks, mesh = plan.data.chunks, plan.world.mesh
    received: dict[str, float] = {}
    for call in seen.calls:
        if call.name.startswith("chunk"):
            received[call.op] = received.get(call.op, 0) + call.received_bytes

    def storages(buffers: list) -> int:
        found = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in buffers if b is not None}
        return sum(found.values())

    moments = [value for state in optimizer.state.values() for key, value in state.items() if key == "exp_avg"]
    return {
        "elements": sum(p.numel() for p in model.parameters()),
        "padded": sum(chunk.size for chunk in chunks),
        "chunks": sum(len(chunk.slots) for chunk in chunks),
        "parameters": storages([chunk.work for chunk in chunks]),
        "masters": storages([chunk.master for chunk in chunks if chunk.apart]),
        "gradients": storages([chunk.gradient for chunk in chunks] + [chunk.total for chunk in chunks]),
        "received": received,
        "ledger": {
            **{kind: plan.ledger.local_bytes([kind], mesh) for kind in ("parameter", "gradient", "state")},
            "moments": sum(value.numel() for value in moments),
        },
    }


def frozen(world: Any, plugin: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two AdamW steps with a frozen table and two optimizer groups."""
    model = model_of()
    model.model.embed_tokens.weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:3], "lr": 0.01}, {"params": trained[3:], "weight_decay": 0.2}]
    booster = lindos.Booster(plugin, max_norm=0.5)
    model, *_ = booster.boost(model, torch.optim.AdamW(groups, lr=0.02))
    losses = [booster.step(share(joined_batch(model.config, i), booster.mesh)).loss for i in range(2)]
    return losses, {n: booster.full(n) for n, _ in model.named_parameters()}


def refusal(world: Any, plugin: Any, name: str) -> str:
    """What boost says."""
    model = model_of(dtype=torch.float32)
    make = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}[name]
    try:
        lindos.Booster(plugin).boost(model, make(model.parameters(), lr=0.1))
    except LindosError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def dictionaries(world: Any, plugin: Any) -> bool:
    """model.state_dict() is whole and equal to full(); optimizer.state_dict() is refused."""
    booster, model, optimizer = boosted(plugin)
    booster.step(share(joined_batch(model.config, 0), booster.mesh))
    assert "zero_stage 2: gradients, masters and optimizer state in 2 parts over dp" in booster.describe()
    assert all(torch.equal(value, booster.full(name)) for name, value in model.state_dict().items())
    try:
        optimizer.state_dict()
    except LindosError as error:
        return "booster.save" in str(error)
    return False
