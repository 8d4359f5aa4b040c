"""Text from a model under any plan: every rank holds whole logits, so every rank draws the same token."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lindos.core.errors import InputError

CACHES = ("cache", "past_key_values", "cache_params")  # as forwards of transformers 5.17 to 5.24 name it

# Types whose tokens with a cache are not those without one (indexers that choose among ties, states that do not carry
# over), or whose forward with a cache fails. Measured on their twins; they read the whole text for every token.
UNCACHED = (
    "axk2", "bamba", "blt", "cpmant", "dots3_note", "dots3_note_text", "granitemoehybrid", "hrm_text", "hy_v4", "moshi",
    "prophetnet", "recurrent_gemma", "xlstm",
)  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        max_tokens: at most so many are made.
        temperature: 0 takes the likeliest token; above, draws with logits divided by it.
        top_k: draw among the k likeliest only.
        top_p: draw among the likeliest whose probabilities add up to p.
        seed: of the draws.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens is at least 1; got {self.max_tokens}.")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature is 0 (greedy) or positive; got {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k is at least 1; got {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p is above 0 and at most 1; got {self.top_p}.")
        if self.temperature == 0 and (self.top_k or self.top_p):
            raise InputError("top_k and top_p narrow what is drawn; at temperature 0 nothing is. Give a temperature.")

    def choose(self, logits: torch.Tensor, draw: torch.Generator) -> int:
        """The next token for logits of shape [vocabulary]."""
        if self.temperature == 0:
            return int(logits.argmax())
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < len(logits):
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[-1], float("-inf"))
        if self.top_p is not None:
            sorted_, order = torch.softmax(logits, -1).sort(descending=True)
            beyond = order[sorted_.cumsum(0) - sorted_ >= self.top_p]  # the one that reaches p stays
            logits = logits.index_fill(0, beyond, float("-inf"))
        return int(torch.multinomial(torch.softmax(logits, -1), 1, generator=draw))


class _Reader:
    """Last logits of a text that grows. Keeps the model's cache where it has one, so that each token is read once."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.cache, self.seen = model, None, 0
        self.device = next(model.parameters()).device
        self.longest = positions_of(model) or 1 << 30
        accepted = inspect.signature(type(model).forward).parameters
        cached = getattr(getattr(model, "config", None), "model_type", None) not in UNCACHED
        self.name = next((name for name in CACHES if name in accepted and cached), None)
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        self.plain = {"use_cache": False} if "use_cache" in accepted or anything else {}

    def __call__(self, ids: list[int]) -> torch.Tensor:
        """
        Communicates: what the plan's axes do in a forward, and the join of the last logits.
        """
        with torch.no_grad():
            if (
                self.name is None or len(ids) > self.longest
            ):  # the window slides: what a cache holds stands elsewhere now
                self.name = self.cache = None
                out = self._call(ids[-self.longest :], self.plain)
            else:
                given = {} if self.cache is None else {self.name: self.cache}
                out = self._call(ids, {"use_cache": True, **given})
                self.cache = getattr(out, self.name, None)
                self.seen = len(ids) if self.cache is not None else 0
        return out.logits[0, -1].double().cpu()

    def _call(self, ids: list[int], options: dict[str, Any]) -> Any:
        new = torch.tensor([ids[self.seen if self.cache is not None else 0 :]], device=self.device)
        return self.model(input_ids=new, attention_mask=new.new_ones(1, len(ids)), **options)


def positions_of(model: nn.Module) -> int | None:
    """Tokens that the model can read at once, where its configuration says so."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None)


def stops_of(config: Any, tokenizer: Any = None, folder: str | Path | None = None) -> set[int]:
    """Ids that end a text: of the configuration, the tokenizer, and the folder's generation_config.json."""
    found = [getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    file = Path(folder) / "generation_config.json" if folder is not None else None
    if file is not None and file.is_file():
        found.append(json.loads(file.read_text("utf-8")).get("eos_token_id"))
    return {stop for each in found for stop in (each if isinstance(each, list | tuple) else [each])} - {None}


def stream_ids(
    model: nn.Module, prompt_ids: list[int], sampling: Sampling, stops: Iterable[int] | None = None
) -> Iterator[int]:
    """Token ids after a prompt, one by one, until there are enough or one of `stops` came.

    Args:
        stops: default the configuration's end-of-text ids.

    Raises:
        InputError: an empty prompt.

    Communicates: what the plan's axes do in a forward, and the join of the last logits, per token.
    """
    if not prompt_ids:
        raise InputError("a prompt holds at least one token.")
    ends = stops_of(getattr(model, "config", None)) if stops is None else set(stops)
    draw = torch.Generator().manual_seed(sampling.seed)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    read, ids = _Reader(model), list(prompt_ids)
    try:
        for _ in range(sampling.max_tokens):
            ids.append(sampling.choose(read(ids), draw))
            yield ids[-1]
            if ids[-1] in ends:
                break
    finally:
        for module, training in modes.items():
            module.training = training


def sample_ids(
    model: nn.Module, prompt_ids: list[int], tokens: int, seed: int = 0, temperature: float = 0.0
) -> list[int]:
    """All of `stream_ids`."""
    return list(stream_ids(model, prompt_ids, Sampling(tokens, temperature, seed=seed)))


def sample(model: nn.Module, tokenizer: Any, prompt: str, tokens: int, seed: int = 0, temperature: float = 0.0) -> str:
    """Text after a prompt. An empty prompt starts from the end-of-text token."""
    made = sample_ids(model, prompt_ids(tokenizer, prompt), tokens, seed, temperature)
    return tokenizer.decode(made, skip_special_tokens=True)


def prompt_ids(tokenizer: Any, prompt: str, chat: bool = False) -> list[int]:
    """Ids of a prompt; with `chat`, of a conversation that the prompt opens, by the tokenizer's template.

    Raises:
        InputError: the tokenizer has no chat template.
    """
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise InputError("the tokenizer has no chat template. Leave --chat out, or use a chat model's folder.")
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    found = tokenizer(prompt)["input_ids"] if prompt else []
    return list(found) or [tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0]


def stream_text(tokenizer: Any, ids: Iterable[int]) -> Iterator[str]:
    """Pieces of text as tokens come; a character that is not complete yet waits for the rest of its bytes."""
    seen: list[int] = []
    shown = ""
    for token in ids:
        seen.append(token)
        text = tokenizer.decode(seen, skip_special_tokens=True)
        if not text.endswith("\ufffd") and text.startswith(shown):
            yield text[len(shown) :]
            shown = text
    rest = tokenizer.decode(seen, skip_special_tokens=True)
    if rest.startswith(shown) and rest != shown:
        yield rest[len(shown) :]
