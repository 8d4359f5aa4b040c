"""Random batches for twins of every kind, with padding and labels that differ from row to row."""

from __future__ import annotations

from typing import Any

import torch

from lindos.core.errors import RefusedError
from lindos.hf.kinds import CLASSES_OF, natural_kind, types
from lindos.hf.scaling import special_ids

IGNORED = -100
# Types whose forward needs what only another model can give it.
FED_BY_OTHERS = {
    "gemma4_assistant": "inputs_embeds and shared_kv_states of the model that it assists",
    "gemma4_unified_assistant": "inputs_embeds and shared_kv_states of the model that it assists",
}


def batch(
    config: Any, rows: int, length: int, seed: int, ragged: bool = True, kind: str | None = None
) -> dict[str, torch.Tensor]:
    """A random batch for a model of this configuration and kind; the same for the same seed.

    Token ids avoid those that the configuration names. With `ragged`, rows have padding on the right, each with its own
    number of tokens and of labels.

    **Shapes** by kind, [rows, length] unless said otherwise:

    - causal: input_ids, attention_mask, labels. A label is the token of its own position (the shift is in the loss).
    - masked: the same; a label stands where its token is hidden from input_ids.
    - token: the same, labels are classes. sequence: labels [rows].
    - image: pixel_values [rows, channels, height, width], labels [rows].
    - conditional: input_ids and attention_mask, or input_features [rows, bins, frames]; labels [rows, length + 3].

    Raises:
        RefusedError: the type needs inputs that are not made here (named).
    """
    kind = kind or natural_kind(config.model_type) or "causal"
    if config.model_type in FED_BY_OTHERS:
        raise RefusedError(f"{config.model_type} takes {FED_BY_OTHERS[config.model_type]}: no batch of its own exists.")
    draw = torch.Generator().manual_seed(seed)
    if kind == "image":
        return {"pixel_values": _images(config, rows, draw), "labels": _classes(config, (rows,), draw, ragged)}
    length = _fixed_length(config) or length
    if kind == "conditional":
        return _conditional(config, rows, length, draw, ragged)
    made = _text(config, rows, length, draw, ragged)
    if kind == "masked":
        labels, ids = made["labels"], made["input_ids"]
        hidden = (torch.rand(rows, length, generator=draw) < 0.5) & (labels != IGNORED)
        hidden[:, 0] = True
        labels[~hidden] = IGNORED
        ids[hidden] = _ordinary(config)[torch.randint(len(_ordinary(config)), (int(hidden.sum()),), generator=draw)]
    elif kind in CLASSES_OF:
        shape = (rows,) if kind == "sequence" else (rows, length)
        classes = _classes(config, shape, draw, ragged and kind == "sequence")
        made["labels"] = classes if kind == "sequence" else classes.masked_fill(made["labels"] == IGNORED, IGNORED)
    return made


def _text(config: Any, rows: int, length: int, draw: torch.Generator, ragged: bool) -> dict[str, torch.Tensor]:
    """Token ids whose labels are themselves."""
    text = config.get_text_config()
    ordinary = _ordinary(config)
    input_ids = ordinary[torch.randint(len(ordinary), (rows, length), generator=draw)]
    mask = torch.ones(rows, length, dtype=torch.long)
    labels = input_ids.clone()
    if ragged:
        valid = torch.randint((length + 1) // 2, length + 1, (rows,), generator=draw)
        valid[torch.randint(rows, (1,), generator=draw)] = length
        mask = (torch.arange(length) < valid[:, None]).long()
        dropped = torch.rand(rows, length, generator=draw) < torch.rand(rows, 1, generator=draw) * 0.4
        labels[dropped | (mask == 0)] = IGNORED
        pad = getattr(text, "pad_token_id", None)
        input_ids[mask == 0] = pad if isinstance(pad, int) and 0 <= pad < text.vocab_size else 0
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def _conditional(config: Any, rows: int, length: int, draw: torch.Generator, ragged: bool) -> dict[str, torch.Tensor]:
    """A source and its target, which has another length."""
    target = _text(config, rows, length + 3, draw, ragged)
    if config.model_type == "whisper":
        shape = (rows, config.num_mel_bins, 2 * config.max_source_positions)
        source = {"input_features": torch.randn(shape, generator=draw)}
    elif config.model_type in types("conditional", speech=False) and _reads_ids(config):
        source = _text(config, rows, length, draw, ragged)
    else:
        raise RefusedError(f"{config.model_type}: batches of this type's inputs are not made yet.")
    return {**source, "labels": target["labels"]}


def _reads_ids(config: Any) -> bool:
    return config.is_encoder_decoder and hasattr(config, "vocab_size") and not hasattr(config, "audio_config")


def _images(config: Any, rows: int, draw: torch.Generator) -> torch.Tensor:
    size = getattr(config, "image_size", None)
    if size is None:
        raise RefusedError(f"{config.model_type}: its configuration has no image_size to make images of.")
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(rows, getattr(config, "num_channels", 3), height, width, generator=draw)


def _classes(config: Any, shape: tuple[int, ...], draw: torch.Generator, ragged: bool) -> torch.Tensor:
    labels = torch.randint(config.num_labels, shape, generator=draw)
    if ragged and labels.numel() > 1:
        labels[torch.randint(len(labels), (1,), generator=draw)] = IGNORED
    return labels


def _ordinary(config: Any) -> torch.Tensor:
    """Ids with no meaning of their own."""
    special = special_ids(config.to_dict())
    return torch.tensor([i for i in range(config.get_text_config().vocab_size) if i not in special])


def _fixed_length(config: Any) -> int | None:
    """The only length that a type trains with, or None."""
    if getattr(config, "axial_pos_embds", False):
        height, width = config.axial_pos_shape
        return height * width
    return None
