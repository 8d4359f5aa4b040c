"""Models, configurations and tokenizers of transformers, by folder or by type."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lindos.core.errors import DataError, InputError, LindosError, RefusedError, nearest
from lindos.hf import refuse
from lindos.parallel.dropout import fields_of

ENDINGS = {
    "masked": ("ForMaskedLM", "XLMWithLMHeadModel", "FlaubertWithLMHeadModel"),  # the last two by their loss
    "causal": ("ForCausalLM", "LMHeadModel"),
    "classification": ("ForSequenceClassification", "ForImageClassification", "ForTokenClassification"),
}
# Mappings of transformers whose classes are of a kind whatever their names end with.
LISTED = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    "conditional": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
}


def is_transformers(model: nn.Module) -> bool:
    """Whether a model is transformers' own; asks without importing it."""
    return any(
        c.__module__.startswith("transformers.") and c.__name__ == "PreTrainedModel" for c in type(model).__mro__
    )


def kind_of(model: nn.Module) -> str | None:
    """causal, masked, classification or conditional (an encoder and a decoder) by the class's name, else None."""
    if not is_transformers(model):
        return None
    name = type(model).__name__
    kind = next((kind for kind, endings in ENDINGS.items() if name.endswith(endings)), None)
    return kind or next((kind for kind in LISTED if name in _listed(kind) and _has_parts_of(model, kind)), None)


@functools.cache
def _listed(kind: str) -> frozenset[str]:
    from transformers.models.auto import modeling_auto

    return frozenset(name for mapping in LISTED[kind] for name in getattr(modeling_auto, mapping).values())


def _has_parts_of(model: nn.Module, kind: str) -> bool:
    """Speech models that only decode stand among the conditional ones too."""
    return bool(getattr(model.config, "is_encoder_decoder", False)) == (kind == "conditional")


def decoder_inputs(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """How a conditional model makes decoder_input_ids from labels: its own method, or its module's function."""
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None) or getattr(model, "_shift_right", None)
    if own is not None:
        return own
    shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    if shift is None:
        return None
    config = model.config
    return lambda labels: shift(labels, config.pad_token_id, config.decoder_start_token_id)


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
        _refuse_remote_code(folder, CONFIG_MAPPING)
        try:
            config = AutoConfig.from_pretrained(path_or_type, trust_remote_code=False)
        except Exception as error:  # a type that this transformers does not know, or numbers that contradict each other
            raise InputError(f"{folder / 'config.json'} is no configuration that transformers {version()} takes: "
                             f"{_line(error)}") from error  # fmt: skip
        refuse.quantised(config, folder)
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
    """A model from its configuration, freshly initialised (or on meta under `lindos.lazy()`).

    The class is the one that the configuration names (`architectures`), else the type's causal one, else its natural.

    Raises:
        InputError: transformers cannot build it.
        RefusedError: it names a class that transformers does not have, or is quantised.
    """
    import transformers

    from lindos.hf import kinds

    refuse.quantised(config)
    named = next(iter(getattr(config, "architectures", None) or ()), "")
    cls = getattr(transformers, named, None)
    if named and cls is None:
        raise RefusedError(
            f"the configuration names the class {named} (architectures), which transformers {version()} does not have. "
            "Name one that it has in config.json, or take the field out for the type's own."
        )
    try:
        if cls is not None and issubclass(cls, transformers.PreTrainedModel):
            return cls._from_config(config)
        return kinds.class_for(config.model_type, kinds.kind_of_type(config.model_type)).from_config(config)
    except LindosError:
        raise
    except Exception as error:
        raise InputError(f"{type(config).__name__} cannot be built: {_line(error)}") from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _refuse_remote_code(folder: Path, known: Any) -> None:
    """A type that transformers has is built by transformers, whatever code the folder names besides.

    Raises:
        RefusedError: the type is the folder's own code, which transformers would ask about, or run.
    """
    try:
        fields = json.loads((folder / "config.json").read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{folder / 'config.json'} is no JSON: {error}.") from error
    if "auto_map" in fields and fields.get("model_type") not in known:
        raise RefusedError(
            f"{folder / 'config.json'} names code of its own (auto_map), which lindos does not run: no plan of it is "
            "proven. Use a type that transformers has, or build the model yourself and give it to Booster with rules."
        )


def output_of(loss: torch.Tensor) -> Any:
    """What a call with labels returns: the loss; logits stayed local and are not given."""
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(loss=loss, logits=None)


def quiet() -> None:
    """No warnings of transformers: a long run over default configurations would be all of them."""
    import transformers

    transformers.logging.set_verbosity_error()


def version() -> str:
    """Of transformers."""
    import transformers

    return transformers.__version__


def trusted_model(folder: str) -> nn.Module:
    """The causal language model of a folder that brings code of its own, in fp32 and whole. That code runs."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise DataError(f"no model can be loaded from {folder!r}: {error}") from None


def load_tokenizer(folder: str, trusted: bool = False) -> Any:
    """The tokenizer of a folder.

    Args:
        trusted: run the code that the folder brings.

    Raises:
        DataError: the folder has none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        raise DataError(f"no tokenizer can be loaded from {folder!r}: {error}") from None


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that gives logits over the vocabulary, where the model has one."""
    return _given(model, "get_output_embeddings")


def input_table(model: nn.Module) -> nn.Module | None:
    """The module that looks ids up, where the model has one."""
    return _given(model, "get_input_embeddings")


def _given(model: nn.Module, getter: str) -> nn.Module | None:
    get = getattr(model, getter, None)
    try:
        return get() if get else None
    except (NotImplementedError, AttributeError):  # how models of images and sound say that they have none
        return None


def head_of(model: nn.Module) -> torch.Tensor | None:
    """The weight of the output head, where the model has one."""
    return getattr(output_head(model), "weight", None)


def table_of(model: nn.Module) -> torch.Tensor | None:
    """The weight of the input embedding, where the model has one."""
    table = input_table(model)
    return table.weight if isinstance(table, nn.Embedding) else None


def vocabulary_of(model: nn.Module) -> int | None:
    """Rows of the output head, where the model has one."""
    head = head_of(model)
    return None if head is None else head.shape[0]


def ids_of(model: nn.Module) -> int | None:
    """Rows of the input embedding, where the model has one."""
    table = table_of(model)
    return None if table is None else table.shape[0]


def classes_of(model: nn.Module) -> int | None:
    """Classes of a classification model."""
    return getattr(getattr(model, "config", None), "num_labels", None) if kind_of(model) == "classification" else None


# Causal by name, but their own loss compares a position with its own label: the user shifts the labels.
UNSHIFTED = (
    "BartForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM", "CpmAntForCausalLM", "MBartForCausalLM",
    "MarianForCausalLM", "MvpForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM", "TrOCRForCausalLM",
    "WhisperForCausalLM", "XLNetLMHeadModel",
)  # fmt: skip


def other_loss(model: nn.Module) -> str | None:
    """Why a model's own loss is another one than its kind says, or None."""
    if type(model).__name__ in UNSHIFTED:
        return "its labels are not shifted as in other causal models"
    if type(model).__name__.startswith(("ProphetNet", "XLMProphetNet")):
        return "it predicts several tokens at each position and sums over them"
    if kind_of(model) == "conditional" and getattr(model.config, "output_router_logits", False):
        return "it adds losses of its routers (set config.output_router_logits=False)"
    if _adds_router_loss(getattr(model, "config", None)):
        return "it adds losses of its routers by coefficients of its own (set output_router_logits=False)"
    if kind_of(model) == "classification":
        config = model.config
        problem = getattr(config, "problem_type", None)
        if problem in ("regression", "multi_label_classification") or getattr(config, "num_labels", 2) == 1:
            return f"its loss is a {(problem or 'regression').replace('_', ' ')}, not a cross-entropy over classes"
    return None


def _adds_router_loss(config: Any) -> bool:
    """Whether routers are asked for their loss, and it is not by the one coefficient that is known."""
    asked = any(name.endswith("output_router_logits") and value is True for name, value in fields_of(config))
    own = getattr(config, "output_router_logits", False) and hasattr(config, "router_aux_loss_coef")
    return asked and not own


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
