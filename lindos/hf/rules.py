"""Rules read from a transformers model's own tensor-parallel plan."""

from __future__ import annotations

from torch import nn

from lindos.core.errors import RefusedError
from lindos.core.rules import Rules
from lindos.hf.infer import infer

# Style names of transformers 4.57 to 5.24 and the roles that they mean; None: what the module's own role settles.
STYLES: dict[str, str | None] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gathered_column",
    "colwise_rep": "gathered_column",
    "rowwise_split_input": "split_row",
    "rowwise_rep": "split_row",
    "embedding_rowwise": "vocabulary_embedding",
    "embedding_colwise": None,
    "packed_colwise": None,
    "packed_rowwise": None,
    "local_colwise": None,
    "local_rowwise": None,
    "local_packed_rowwise": None,
    "local_params": None,
    "local": None,
    "gather": None,
    "replicate": "whole",
    "sequence_parallel": None,
    "replicated_with_grad_allreduce": "head_norm",
    "mla_kv_a_proj": "latent",
    "all_reduce": None,
    "moe_tp_experts": "experts",
    "moe_identity_expert": None,
    "grouped_gemm": None,
    "ep_router": None,
    "ep_dispatch_experts": None,
}


def rules_of(model: nn.Module, parts: int) -> Rules:
    """The rules of a model for tp = `parts`: by structure, with its plan read for what structure does not know.

    Raises:
        RefusedError: the plan names a style that this table does not know.
    """
    kind = type(model).__name__
    for pattern, style in plan_of(model).items():
        if style not in STYLES:
            raise RefusedError(f"{kind}: the plan gives {pattern!r} the style {style!r}, unknown to this lindos.")
    return infer(model, parts)


def plan_of(model: nn.Module) -> dict[str, str]:
    """The tensor-parallel plan that transformers gives a model, merged over its children."""
    return dict(getattr(model, "tp_plan", None) or {})
