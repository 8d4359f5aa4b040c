"""The rules of a model for tensor parallelism, and the styles that transformers' own plans may name."""

from __future__ import annotations

from torch import nn

from lindos.core.errors import RefusedError
from lindos.core.rules import Rules
from lindos.hf.infer import infer

# Style names of transformers 4.57 to 5.24. Rules come from structure; a plan with another word is of a transformers
# that may mean what structure cannot see, so it is refused by name.
STYLES = frozenset((
    "colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep",
    "embedding_rowwise", "embedding_colwise", "packed_colwise", "packed_rowwise", "local_colwise", "local_rowwise",
    "local_packed_rowwise", "local_params", "local", "gather", "replicate", "sequence_parallel",
    "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "moe_tp_experts", "moe_identity_expert",
    "grouped_gemm", "ep_router", "ep_dispatch_experts",
))  # fmt: skip


def rules_of(model: nn.Module, parts: int) -> Rules:
    """The rules of a model for tp = `parts`, by structure.

    Raises:
        RefusedError: the model's plan names a style that this table does not know.
    """
    kind = type(model).__name__
    for pattern, style in plan_of(model).items():
        if style not in STYLES:
            raise RefusedError(f"{kind}: the plan gives {pattern!r} the style {style!r}, unknown to this lindos.")
    return infer(model, parts)


def plan_of(model: nn.Module) -> dict[str, str]:
    """The tensor-parallel plan that transformers gives a model, merged over its children."""
    return dict(getattr(model, "tp_plan", None) or {})
