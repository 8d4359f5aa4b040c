"""Models, configurations and tokenizers of transformers, by folder or by type."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lindos.core.errors import DataError, InputError, nearest

KINDS = {
    "causal": ("ForCausalLM", "LMHeadModel"),
    "masked": ("ForMaskedLM",),
    "classification": ("ForSequenceClassification", "ForImageClassification", "ForTokenClassification"),
}


def is_transformers(model: nn.Module) -> bool:
    """Whether a model is transformers' own; asks without importing it."""
    return any(
        c.__module__.startswith("transformers.") and c.__name__ == "PreTrainedModel" for c in type(model).__mro__
    )


def kind_of(model: nn.Module) -> str | None:
    """causal, masked or classification by the class's name, else None."""
    if not is_transformers(model):
        return None
    name = type(model).__name__
    return next((kind for kind, endings in KINDS.items() if name.endswith(endings)), None)


def config_of(path_or_type: str, **overrides: Any) -> Any:
    """A configuration from a folder with config.json, or a type's default, with fields overridden.

    Raises:
        InputError: no such folder or type (the nearest is named), or an unknown field.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder = Path(path_or_type)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise DataError(f"a model folder holds config.json; {path_or_type!r} does not.")
        config = AutoConfig.from_pretrained(path_or_type)
        make = functools.partial(AutoConfig.from_pretrained, path_or_type)
    elif path_or_type in CONFIG_MAPPING:
        make = CONFIG_MAPPING[path_or_type]
        config = make()
    else:
        raise InputError(
            f"{path_or_type!r} is no folder and no model type: {nearest(path_or_type, CONFIG_MAPPING)[:300]}."
        )
    for field, value in overrides.items():
        if not hasattr(config, field):
            raise InputError(
                f"{type(config).__name__} has no field {field!r}: {nearest(field, config.to_dict())[:300]}."
            )
        setattr(config, field, value)
    return config


def model_of(config: Any) -> nn.Module:
    """A causal language model from its configuration, freshly initialised (or on meta under `lindos.lazy()`)."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)


def output_of(loss: torch.Tensor) -> Any:
    """What a call with labels returns: the loss; logits stayed local and are not given."""
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(loss=loss, logits=None)


def version() -> str:
    """Of transformers."""
    import transformers

    return transformers.__version__


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a folder.

    Raises:
        DataError: the folder has none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise DataError(f"no tokenizer can be loaded from {folder!r}: {error}") from None


def vocabulary_of(model: nn.Module) -> int | None:
    """Rows of the output head, where the model has one."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get else None
    return None if head is None or not hasattr(head, "weight") else head.weight.shape[0]


def ids_of(model: nn.Module) -> int | None:
    """Rows of the input embedding, where the model has one."""
    get = getattr(model, "get_input_embeddings", None)
    try:
        table = get() if get else None
    except NotImplementedError:
        return None
    return table.weight.shape[0] if isinstance(table, nn.Embedding) else None


def classes_of(model: nn.Module) -> int | None:
    """Classes of a classification model."""
    return getattr(getattr(model, "config", None), "num_labels", None) if kind_of(model) == "classification" else None


UNSHIFTED = ("XLNetLMHeadModel", "CpmAntForCausalLM")  # causal by name, but their labels are not shifted


def other_loss(model: nn.Module) -> str | None:
    """Why a model's own loss is another one than its kind says, or None."""
    if type(model).__name__ in UNSHIFTED:
        return "its labels are not shifted as in other causal models"
    if kind_of(model) == "classification":
        config = model.config
        problem = getattr(config, "problem_type", None)
        if problem in ("regression", "multi_label_classification") or getattr(config, "num_labels", 2) == 1:
            return f"its loss is a {(problem or 'regression').replace('_', ' ')}, not a cross-entropy over classes"
    return None


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are part of a model's state, by name."""
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def router_loss(model: nn.Module) -> float:
    """The coefficient of an auxiliary router loss that the model adds to its own loss, or 0."""
    config = getattr(model, "config", None)
    if config is None or not getattr(config, "output_router_logits", False):
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)


def validation_loss(folder: str, batches: Iterable[Mapping[str, torch.Tensor]]) -> float:
    """Mean loss over the valid positions of batches, by transformers alone in one process, fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            logits = model(batch["input_ids"]).logits[:, :-1].float()
            labels = batch["labels"][:, 1:]
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            total, count = total + float(losses), count + int((labels != -100).sum())
    return total / count


def attention_of(model: nn.Module) -> str:
    """What attention a model of transformers runs: sdpa, eager, ...; empty for other models."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
