"""Models that would run wrongly, or stop in their first forward: found by what they hold, before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from lindos.core.errors import InputError, RefusedError

TOP = ("top_k", "num_experts_per_tok", "moe_topk")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def quantised(config: Any, folder: Path | None = None) -> None:
    """
    Raises:
        RefusedError: a folder of quantised weights, or of linears that quantise as they run.
    """
    found = getattr(config, "quantization_config", None)
    if found:
        method = (found if isinstance(found, dict) else vars(found)).get("quant_method", "unknown")
        raise RefusedError(
            f"{folder or type(config).__name__} has a quantization_config ({method}), which changes what its layers "
            "compute: lindos trains and splits plain weights. Write it out dequantised, without that field."
        )


def contradictions(model: nn.Module) -> None:
    """Numbers of a model that contradict each other, at any plan.

    Raises:
        InputError: names the module and the numbers.
        RefusedError: the model is quantised.
    """
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise RefusedError("the model is quantised: lindos trains and splits plain weights. Load it dequantised.")
    for name, module in model.named_modules():
        q, k, size = (getattr(module, key, None) for key in ("q_proj", "k_proj", "head_dim"))
        if isinstance(q, nn.Linear) and isinstance(k, nn.Linear) and isinstance(size, int) and size > 0:
            query, key_value = q.weight.shape[0] // size, k.weight.shape[0] // size
            if key_value < 1 or query % key_value:
                raise InputError(
                    f"{name}: {query} attention heads must be a multiple of the {key_value} key-value heads. Change "
                    "num_attention_heads or num_key_value_heads of the configuration."
                )
        top, count = (_number(module, names) for names in (TOP, EXPERTS))
        if top and count and top > count:
            raise InputError(
                f"{name}: each token takes {top} experts of {count}. Change num_experts_per_tok or the number of "
                "experts in the configuration."
            )


def _number(module: nn.Module, names: tuple[str, ...]) -> int:
    for name in names:
        value = module.__dict__.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0
