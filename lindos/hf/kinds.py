"""Kinds of models: what a model of a type is trained for, and the class of transformers that builds it."""

from __future__ import annotations

from typing import Any

from lindos.core.errors import InputError, nearest

# Kind -> the mappings of transformers that hold its types, in the order in which they are asked, and the Auto classes.
KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "causal": (("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),),
    "conditional": (
        ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
        ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "AutoModelForSpeechSeq2Seq"),
    ),
    "masked": (("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),),
    "image": (("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification"),),
    "sequence": (("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForSequenceClassification"),),
    "token": (("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", "AutoModelForTokenClassification"),),
}
CLASSES_OF = ("image", "sequence", "token")  # kinds that sort into classes
CLASSES = 7  # of a twin


def types(kind: str = "causal", speech: bool = True) -> list[str]:
    """Every model type that transformers can build as a model of this kind.

    Args:
        speech: With those that only a mapping for speech has.


    Raises:
        InputError: no such kind.
    """
    from transformers.models.auto import modeling_auto

    return sorted({name for mapping, _ in KINDS[_known(kind)] if speech or "SPEECH" not in mapping
                   for name in getattr(modeling_auto, mapping)})  # fmt: skip


def natural_kind(model_type: str) -> str | None:
    """The first in `KINDS` that has the type; None for the type of a part of a model."""
    return next((name for name in KINDS if model_type in types(name)), None)


def kind_of_type(model_type: str, kind: str | None = None) -> str:
    """The kind that is meant: the one that is given, else the natural one.

    "classification" stands for image where the type has that, else for sequence.

    Raises:
        InputError: no such kind or type, or no model of this type and kind.
    """
    having = [name for name in KINDS if model_type in types(name)]
    if kind == "classification":
        kind = "image" if "image" in having else "sequence"
    if kind is not None:
        _known(kind)
    if not having:
        known = sorted({name for each in KINDS for name in types(each)})
        raise InputError(f"{model_type!r} is no model type of transformers of a kind that lindos knows: "
                         f"{nearest(model_type, known)[:300]}")  # fmt: skip
    if kind is None:
        return having[0]
    if kind not in having:
        raise InputError(f"transformers has no {kind} model of type {model_type!r}. Kinds of it: {', '.join(having)}.")
    return kind


def class_for(model_type: str, kind: str) -> Any:
    """The Auto class that builds models of this type and kind."""
    import transformers
    from transformers.models.auto import modeling_auto

    return next(
        getattr(transformers, name) for mapping, name in KINDS[kind] if model_type in getattr(modeling_auto, mapping)
    )


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise InputError(f"kind={kind!r}: {nearest(kind, [*KINDS, 'classification'])}")
    return kind
