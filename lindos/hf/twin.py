"""The twin: a model of any Hugging Face type, small enough for a test and with the type's own pattern.

A twin starts from the default configuration of its type and only sizes shrink: kinds of layers, tied or separate
embeddings, activations, norms, experts, sliding windows, softcaps, biases and partial rotaries stay. Its sizes are
pairwise different, so nothing in lindos can be told apart by shape alone, and no parameter keeps a special value
(a norm of ones, a bias of zeros), because special values hide faults.
"""

from __future__ import annotations

from typing import Any

import torch

from lindos.core.errors import InputError, RefusedError
from lindos.hf import models
from lindos.hf.batches import batch as batch
from lindos.hf.kinds import class_for, kind_of_type
from lindos.hf.kinds import types as types
from lindos.hf.scaling import attempt, twin_config
from lindos.hf.twin_sizes import WORDS as WORDS

LARGEST = 5_000_000  # parameters of a twin: more means that some size has no entry in twin_sizes


def twin(
    model_type: Any, seed: int = 0, dtype: torch.dtype = torch.float64, kind: str | None = None, **overrides: Any
) -> torch.nn.Module:
    """A small model of the given type: same seed, same values; in training mode, without dropout.

    A configuration is built as it is; a type goes through `twin_config` with the overrides. Values are drawn in fp64
    and rounded to `dtype`, so twins of one seed agree over dtypes. Experts run eagerly, since the grouped product
    refuses fp64.

    Args:
        kind: What the model is for, one of `lindos.hf.kinds.KINDS`; default the type's natural kind.
    """
    if isinstance(model_type, str):
        config = twin_config(model_type, kind, **overrides)
    elif overrides:
        raise InputError(f"twin(config) builds the configuration as it is, got {sorted(overrides)} too. "
                         "Give them to twin_config(config, ...) and build its result")  # fmt: skip
    else:
        config = model_type
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(config, kind_of_type(config.model_type, kind)).to(torch.float64)
        count = sum(parameter.numel() for parameter in model.parameters())
        if count > LARGEST and isinstance(model_type, str):
            raise RefusedError(
                f"no twin of {model_type}: it must have at most {LARGEST:,} parameters, got {count:,}. "
                "Give the sizes of its own fields as overrides"
            )
        _randomise(model, torch.Generator().manual_seed(seed + 1))
    if isinstance(model_type, str) and "tied" in overrides:
        check_tied(model, overrides["tied"])
    model.config.dtype = dtype
    return model.to(dtype).train()


def check_tied(model: torch.nn.Module, wanted: bool) -> None:
    """Some types have the field and go by other rules.

    Raises:
        InputError: the head is tied to the embedding although it should not be, or the other way round.
    """
    head, table = models.head_of(model), models.table_of(model)
    tied = head is not None and table is not None and head is table
    if wanted and not tied:
        raise InputError(f"{type(model).__name__} does not tie its head to its embedding, whatever its configuration "
                         "says. Leave tied out")  # fmt: skip
    if tied and not wanted:
        raise InputError(f"{type(model).__name__} ties its head whatever its configuration says. Leave tied out")


def _build(config: Any, kind: str) -> torch.nn.Module:
    """The model in fp32 with the type's own initialisation."""
    import transformers

    auto = class_for(config.model_type, kind)
    if config.architectures is None:
        config.architectures = []  # asked where a kind has several classes

    def make(attention: str):
        return auto.from_config(
            config, dtype=torch.float32, attn_implementation=attention, experts_implementation="eager"
        )

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return make("sdpa")
    except (ValueError, ImportError):  # the class says that it has no such attention
        return attempt(config.model_type, make, "eager")
    except Exception as error:
        return attempt(config.model_type, _raise, error)
    finally:
        transformers.logging.set_verbosity(level)


def _raise(error: Exception):
    raise error


@torch.no_grad()
def _randomise(model: torch.nn.Module, draw: torch.Generator) -> None:
    """Moves each parameter off its special value: constants get noise of 0.1, matrices a deviation of 0.1.

    Parameters that are neither constant nor centred (decay rates of state-space layers) carry a meaning in their
    values and only get noise of 0.01.
    """
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        low, high, mean = parameter.min(), parameter.max(), parameter.mean()
        if low == high:
            parameter.add_(0.1 * noise)
        elif parameter.dim() >= 2 and mean.abs() < 0.5 * parameter.std():
            parameter.mul_(0.1 / parameter.std()).add_(0.01 * noise)  # the noise reaches rows of zeros, as of padding
        else:
            parameter.add_(0.01 * noise)
