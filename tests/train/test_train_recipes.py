"""The published sizes, counted on meta."""

from __future__ import annotations

import pytest
import torch

from lindos.hf import models
from lindos.train.assembly import config_of
from lindos.train.config import steps_of
from lindos.train.recipes import recipe


@pytest.mark.parametrize(
    ("name", "parameters", "tokens", "lr"),
    [
        ("llama-7b", 6_738_415_616, 1.0e12, 3.0e-4),
        ("llama-13b", 13_015_864_320, 1.0e12, 3.0e-4),
        ("llama-30b", 32_528_943_616, 1.4e12, 1.5e-4),
        ("llama-65b", 65_285_660_672, 1.4e12, 1.5e-4),
    ],
)
def test_llama_sizes(name, parameters, tokens, lr):
    config = recipe(name)
    made = config_of(config.model, None, config.data.sequence)
    with torch.device("meta"):
        model = models.model_of(made)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert (config.train.tokens, config.optim.lr) == (tokens, lr)
    assert made.max_position_embeddings == 2048
    assert made.head_dim == 128
    steps = steps_of(config, 64)
    assert (steps.tokens, steps.rows, steps.micro_batches) == (4_194_304, 32, 32)


def test_every_size_of_a_recipe_reaches_the_model():
    config = recipe("llama-demo")
    made = config_of(config.model, None, config.data.sequence)
    assert (made.hidden_size, made.num_hidden_layers, made.head_dim) == (128, 2, 32)
    assert made.num_key_value_heads == made.num_attention_heads == 4
    assert made.max_position_embeddings == config.data.sequence
