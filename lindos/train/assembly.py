"""Model, optimizer and scheduler from their sections, before they are boosted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lindos.core.errors import InputError
from lindos.corpus.tokenizer import Tokenizer, check_vocabulary
from lindos.train.config import Model, Optim
from lindos.train.schedule import WarmupCosine, warmup_steps

# Fields of the section and the generic words of lindos.hf.twin that name them in every type's configuration.
SIZES = ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocabulary", "positions", "tied")


def model_of(section: Model, tokenizer: Tokenizer, sequence: int) -> nn.Module:
    """The model on meta; its weights come when it is boosted.

    Raises:
        InputError: an unknown type, size or option.
        DataError: a folder that cannot be read, or a tokenizer with more tokens than the model.
    """
    import lindos
    from lindos.hf import models

    if section.from_weights:
        given = [name for name in (*SIZES, "options") if getattr(section, name) not in (None, ())]
        if given:
            raise InputError(f"model.from_weights keeps the sizes of its folder, got model.{given[0]}. Leave it out.")
        model = lindos.from_pretrained(section.path)
        check_vocabulary(tokenizer, model.config.get_text_config().vocab_size)
        return model
    config = config_of(section, tokenizer, sequence)
    check_vocabulary(tokenizer, config.get_text_config().vocab_size)
    with lindos.lazy():
        return models.model_of(config)


def config_of(section: Model, tokenizer: Tokenizer | None, sequence: int) -> Any:
    """The configuration of transformers that the section describes.

    Raises:
        InputError: a size that the type's configuration has no field for, or an option that is not NAME=VALUE.
    """
    from lindos.hf import models
    from lindos.hf.twin import WORDS

    source = section.path or section.type
    plain = models.config_of(source)
    wanted = {name: getattr(section, name) for name in SIZES if getattr(section, name) is not None}
    if "heads" in wanted and "kv_heads" not in wanted and _field(plain, WORDS["kv_heads"]):
        wanted["kv_heads"] = wanted["heads"]
    if section.path is None:
        wanted.setdefault("positions", sequence)
        if tokenizer is not None:
            wanted.setdefault("vocabulary", tokenizer.vocabulary_size)
    overrides: dict[str, Any] = {}
    for name, value in wanted.items():
        field = _field(plain, WORDS[name])
        if field is None:
            if name == "positions" and section.positions is None:
                continue
            raise InputError(f"the configuration of {source} has no field for model.{name}. Use model.options instead.")
        overrides[field] = value
    if {"hidden", "heads"} & wanted.keys() and getattr(plain, "head_dim", None) is not None:
        hidden = overrides.get(_field(plain, WORDS["hidden"]), plain.hidden_size)
        heads = overrides.get(_field(plain, WORDS["heads"]), plain.num_attention_heads)
        if hidden % heads:
            raise InputError(f"model.heads must divide model.hidden, got {hidden} features and {heads} heads.")
        overrides["head_dim"] = hidden // heads
    if tokenizer is not None and section.path is None:
        for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if hasattr(plain, field):
                overrides[field] = tokenizer.end_of_text_id
    return models.config_of(source, **{**overrides, **_options(section.options)})


def adamw(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """AdamW, fused, in two groups: what decays and what does not."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed, kept = [], []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        matrix = parameter.dim() >= 2 and (optim.decay_on != "matrices" or id(parameter) not in tables)
        (decayed if matrix or optim.decay_on == "all" else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def scheduler_of(optimizer: torch.optim.Optimizer, optim: Optim, total: int) -> WarmupCosine:
    """The schedule over the run's steps."""
    return WarmupCosine(optimizer, total, warmup_steps(optim, total), optim.min_lr_ratio)


def tokenizer_folder(corpus_folder: Path) -> str:
    """Where the tokenizer lies that wrote the shards."""
    from lindos.corpus.index import TOKENIZER_FOLDER

    return str(corpus_folder / TOKENIZER_FOLDER)


def _field(config: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if hasattr(config, name)), None)


def _options(pairs: tuple[str, ...]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InputError(f"model.options must be NAME=VALUE, got {pair!r}.")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
