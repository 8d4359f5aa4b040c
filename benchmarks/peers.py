"""The sides of the race: each makes a model of the same job and gives a step to be timed.

All sides run the same recipe: AdamW (fused), sdpa attention, one thread a rank, no clipping. In bf16 all compute in
bf16 with fp32 masters that AdamW steps and copies back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

Step = Callable[[dict[str, torch.Tensor]], float]


def job_config() -> LlamaConfig:
    """The small job: Llama of 8 layers, width 256, inner 688, 8 heads, vocabulary 4,096."""
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )


def batch_of(seed: int, rows: int = 4, length: int = 256) -> dict[str, torch.Tensor]:
    ids = torch.randint(4096, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(job_config())


class Masters:
    """What AdamW steps: local shards (fused AdamW takes no mix of DTensors and tensors), in bf16 their fp32 masters."""

    def __init__(self, parameters: Iterator[nn.Parameter], bf16: bool) -> None:
        self.parameters, self.bf16 = list(parameters), bf16
        self.shards = [_local(p.detach()) for p in self.parameters]
        self.masters = [nn.Parameter(shard.float() if bf16 else shard) for shard in self.shards]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=True)

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters):
            gradient = parameter.grad
            if hasattr(gradient, "redistribute"):  # a DTensor's gradient may lie otherwise than its parameter
                gradient = gradient.redistribute(placements=parameter.placements)
            gradient = _local(gradient)
            master.grad, parameter.grad = gradient.float() if self.bf16 else gradient, None
        self.optimizer.step()
        if self.bf16:
            with torch.no_grad():
                torch._foreach_copy_(self.shards, [master.detach() for master in self.masters])
        self.optimizer.zero_grad()


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def _trained(model: nn.Module, bf16: bool, loss_of: Callable[[dict], torch.Tensor]) -> Step:
    optimizer = Masters(model.parameters(), bf16)

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def one_process(bf16: bool) -> Step:
    model = plain_model().to(torch.bfloat16 if bf16 else torch.float32)
    return _trained(model, bf16, lambda batch: model(**batch).loss)


def torch_ddp(bf16: bool) -> Step:
    model = plain_model().to(torch.bfloat16 if bf16 else torch.float32)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _trained(model, bf16, lambda batch: wrapped(**batch).loss)


def transformers_tp(bf16: bool) -> Step:
    """transformers' own tensor parallelism, from its plan."""
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        plain_model().save_pretrained(shared[0])  # transformers writes on rank 0 only
        dist.barrier()
        dtype = torch.bfloat16 if bf16 else torch.float32
        model = AutoModelForCausalLM.from_pretrained(shared[0], dtype=dtype, **_tp_options())
        dist.barrier()
    model.train()
    return _trained(model, bf16, lambda batch: model(**batch).loss)


def _tp_options() -> dict[str, Any]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return {"tp_plan": "auto", "device_mesh": mesh}


def dtensor_tp(bf16: bool) -> Step:
    """torch's parallelize_module with a vocabulary-split head and loss_parallel."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    model = plain_model().to(torch.bfloat16 if bf16 else torch.float32)
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(model.config.num_hidden_layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{i}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{i}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    optimizer = Masters(model.parameters(), bf16)

    def step(batch: dict[str, torch.Tensor]) -> float:
        with loss_parallel():
            logits = model(input_ids=batch["input_ids"]).logits.float()
            labels = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
        optimizer.step()
        return float(loss.detach().full_tensor() if hasattr(loss, "full_tensor") else loss.detach())

    return step


def _lindos(plugin: Any, bf16: bool) -> Step:
    import lindos

    model = plain_model()
    booster = lindos.Booster(plugin, precision="bf16" if bf16 else "fp32")
    model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    return lambda batch: booster.step(batch).loss


def lindos_tp(bf16: bool) -> Step:
    import lindos

    return _lindos(lindos.HybridParallel(tp=2), bf16)


def lindos_ddp(bf16: bool) -> Step:
    import lindos

    return _lindos(lindos.DDP(), bf16)


SIDES: dict[str, Callable[[bool], Step]] = {
    "one process": one_process,
    "torch DDP": torch_ddp,
    "transformers TP2": transformers_tp,
    "DTensor TP2": dtensor_tp,
    "lindos TP2": lindos_tp,
    "lindos DDP": lindos_ddp,
}
SHARED_ROWS = ("transformers TP2", "DTensor TP2", "lindos TP2")
