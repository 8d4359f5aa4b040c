"""A sample from a model under any plan: every rank holds whole logits, so every rank draws the same token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lindos.core.errors import InputError


@torch.no_grad()
def sample_ids(
    model: nn.Module, prompt_ids: list[int], tokens: int, seed: int = 0, temperature: float = 0.0
) -> list[int]:
    """Token ids after a prompt, until `tokens` of them or the end-of-text id.

    Args:
        temperature: 0 takes the likeliest token; above, draws with logits divided by it, from a generator of `seed`.

    Raises:
        InputError: an empty prompt, a negative temperature.

    Communicates: what the plan's axes do in a forward, and the join of the last logits, per token.
    """
    if not prompt_ids:
        raise InputError("a prompt holds at least one token.")
    if temperature < 0:
        raise InputError(f"temperature is 0 (greedy) or positive; got {temperature}.")
    device = next(model.parameters()).device
    draw = torch.Generator().manual_seed(seed)
    config: Any = getattr(model, "config", None)
    longest = getattr(config, "max_position_embeddings", None) or 1 << 30
    stop = getattr(config, "eos_token_id", None)
    stops = set(stop if isinstance(stop, list | tuple) else [stop]) - {None}
    modes = {module: module.training for module in model.modules()}
    model.eval()
    ids, made = list(prompt_ids), []
    try:
        for _ in range(tokens):
            window = torch.tensor([ids[-longest:]], device=device)
            logits = model(input_ids=window, attention_mask=torch.ones_like(window)).logits[0, -1].double().cpu()
            made.append(_choose(logits, temperature, draw))
            ids.append(made[-1])
            if made[-1] in stops:
                break
    finally:
        for module, training in modes.items():
            module.training = training
    return made


def _choose(logits: torch.Tensor, temperature: float, draw: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=draw))


def sample(model: nn.Module, tokenizer: Any, prompt: str, tokens: int, seed: int = 0, temperature: float = 0.0) -> str:
    """Text after a prompt. An empty prompt starts from the end-of-text token."""
    prompt_ids = tokenizer(prompt)["input_ids"] if prompt else []
    if not prompt_ids:
        prompt_ids = [tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0]
    return tokenizer.decode(sample_ids(model, list(prompt_ids), tokens, seed, temperature), skip_special_tokens=True)
