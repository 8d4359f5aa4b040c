"""Rules read from a transformers model's own tensor-parallel plan."""

from __future__ import annotations

import re

from torch import nn

from lindos.core.errors import RefusedError
from lindos.core.rules import Rule, Rules

# Style names of transformers 5.17 to 5.24. None: nothing to do for the module itself (its roles stand elsewhere).
STYLES: dict[str, str | None] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gathered_column",
    "colwise_rep": "gathered_column",
    "rowwise_split_input": "split_row",
    "rowwise_rep": "split_row",
    "embedding_rowwise": "vocabulary_embedding",
    "replicated_with_grad_allreduce": "head_norm",
    "moe_tp_experts": "experts",
    "packed_colwise": None,
    "replicate": "whole",
    "sequence_parallel": None,
}
KEY_VALUE = ("k_proj", "v_proj", "key_proj", "value_proj", "key", "value")


def rules_of(model: nn.Module) -> Rules:
    """The rules of a model from its merged plan.

    Raises:
        RefusedError: the type has no plan, or the plan names a style that this table does not know.
    """
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    kind = type(model).__name__
    if not [style for pattern, style in plan.items() if pattern != "lm_head"]:
        raise RefusedError(
            f"{kind} has no tensor-parallel plan in this transformers. Write rules (ten lines of TOML, docs/rules.md) "
            "and pass them as HybridParallel(tp=..., rules='file.toml')."
        )
    modules = dict(model.named_modules())
    head = _head(model, modules)
    experts = {pattern for pattern, style in plan.items() if style == "moe_tp_experts"}
    rules = []
    for pattern, style in plan.items():
        if style not in STYLES:
            raise RefusedError(f"{kind}: the plan gives {pattern!r} the style {style!r}, unknown to this lindos.")
        if pattern.rpartition(".")[0] in experts or STYLES[style] is None:
            continue  # the fused parameters of experts are cut by the experts' own role
        rules += _expanded(pattern, STYLES[style] or "whole", modules, head)
    if head and not any(rule.matches(head) for rule in rules):
        rules.append(Rule(head, "vocabulary_head", source="completed"))
    return Rules(tuple(rules))


def _head(model: nn.Module, modules: dict[str, nn.Module]) -> str | None:
    """Name of the output head, where it is a plain linear layer."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get else None
    if not isinstance(head, nn.Linear):
        return None
    return next((name for name, module in modules.items() if module is head), None)


def _expanded(pattern: str, role: str, modules: dict[str, nn.Module], head: str | None) -> list[Rule]:
    """The plan's line as rules. A line of the plan may match nothing in this model (an untied or absent head)."""
    probe = Rule(pattern, role)
    names = [name for name in modules if name and probe.matches(name)]
    if not names:
        return []
    if names == [head]:
        return [Rule(pattern, "vocabulary_head", source="plan")]
    leaf = pattern.rpartition(".")[2]
    attention = any(_is_attention(modules.get(name.rpartition(".")[0])) for name in names)
    heads = None
    if attention and role in ("column", "row"):
        heads = "key_value" if leaf in KEY_VALUE else "query"
    if role == "gathered_column" and not attention and re.search("gate_up", leaf):
        return [Rule(pattern, "column", blocks=2, source="plan, fused")]
    if role == "split_row" and not attention and _has_fused_sibling(names[0], modules):
        return [Rule(pattern, "row", source="plan, fused")]
    return [Rule(pattern, role, heads=heads, source="plan")]


def _has_fused_sibling(name: str, modules: dict[str, nn.Module]) -> bool:
    home = name.rpartition(".")[0]
    return any(other.rpartition(".")[0] == home and "gate_up" in other for other in modules)


def _is_attention(module: nn.Module | None) -> bool:
    return module is not None and any(hasattr(module, name) for name in ("head_dim", "attention_head_size"))
