"""Sampling: a cache changes no token, in one process and split over ranks; draws are what they say."""

from pathlib import Path

import pytest
import torch

import lindos
from lindos.core.errors import InputError
from lindos.hf import generate
from lindos.hf.generate import Sampling, sample_ids, stops_of, stream_ids, stream_text
from lindos.hf.twin import twin

torch.set_num_threads(1)
GPT2_RULES = str(Path(__file__).parents[1] / "rules" / "gpt2.toml")
PROMPT = [5, 9, 17, 33, 60]


def _without_cache(model, prompt, tokens):
    """Greedy tokens by reading the whole text each time, as plainly as it can be written."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == model.config.eos_token_id:
                break
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gemma3_text", "gpt2", "opt", "bloom", "mixtral", "mamba", "jamba", "falcon", "bart", "xlm", "axk2"],
)
def test_a_cache_changes_no_token(model_type):
    model = twin(model_type, seed=3, dtype=torch.float32)
    made = sample_ids(model, PROMPT, 12)
    assert model.training, "the mode is as it was"
    model.eval()
    assert made == _without_cache(model, PROMPT, 12)


def test_each_token_is_read_once():
    model, lengths = twin("llama", seed=3, dtype=torch.float32), []
    model.register_forward_pre_hook(lambda m, a, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    sample_ids(model, PROMPT, 4)
    assert lengths == [5, 1, 1, 1]


def test_the_window_slides_at_the_last_position():
    model = twin("gpt2", seed=3, dtype=torch.float32, positions=8)
    model.config.eos_token_id = None
    assert len(sample_ids(model, PROMPT, 6)) == 6


def _split(world, model_type, words, tokens):
    model = twin(model_type, seed=3, dtype=torch.float32, **words)
    rules = GPT2_RULES if model_type == "gpt2" else None
    lindos.Booster(lindos.HybridParallel(tp=world.size, rules=rules)).boost(model)
    greedy = sample_ids(model, PROMPT, tokens)
    drawn = list(stream_ids(model, PROMPT, Sampling(tokens, 0.9, top_k=20, top_p=0.9, seed=5), stops=[]))
    return greedy, drawn


@pytest.mark.parametrize(
    ("model_type", "words", "tp"),
    [
        ("llama", {"heads": 8, "kv_heads": 2, "vocabulary": 131}, 4),
        ("qwen3", {}, 2),
        ("gemma3_text", {"tied": True}, 2),
        ("gpt2", {}, 2),
    ],
)
def test_split_over_ranks_it_says_the_same(ranks, model_type, words, tp):
    model = twin(model_type, seed=3, dtype=torch.float32, **words)
    greedy = sample_ids(model, PROMPT, 12)
    drawn = list(stream_ids(model, PROMPT, Sampling(12, 0.9, top_k=20, top_p=0.9, seed=5), stops=[]))
    for found in ranks.run(_split, tp, model_type, words, 12):
        assert found == (greedy, drawn)


def test_draws():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0], dtype=torch.float64)

    def seen(**options):
        draw = torch.Generator().manual_seed(0)
        sampling = Sampling(temperature=2.0, **options)
        return {sampling.choose(logits, draw) for _ in range(400)}

    assert seen() == {0, 1, 2, 3, 4}
    assert seen(top_k=2) == {0, 1}
    assert seen(top_k=9) == {0, 1, 2, 3, 4}
    assert seen(top_p=0.4) == {0}, "the first reaches p by itself"
    assert seen(top_p=0.6) == {0, 1}
    assert Sampling().choose(logits, torch.Generator()) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "at least 1"),
        ({"temperature": -1.0}, "temperature is 0"),
        ({"temperature": float("nan")}, "temperature is 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p"),
        ({"top_k": 3}, "at temperature 0 nothing is"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(InputError, match=message):
        Sampling(**options)


def test_stops(tmp_path):
    model = twin("llama", seed=3, dtype=torch.float32)
    made = sample_ids(model, PROMPT, 12)
    assert list(stream_ids(model, PROMPT, Sampling(12), stops=[made[3]]))[-1] == made[3]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert stops_of(model.config, None, tmp_path) == {2, 7, 8}


class _Bytes:
    """A tokenizer whose tokens are bytes."""

    eos_token_id = None

    def decode(self, ids, skip_special_tokens):
        return bytes(ids).decode("utf-8", errors="replace")


def test_a_stream_waits_for_whole_characters():
    pieces = list(stream_text(_Bytes(), "aé€".encode()))
    assert pieces == ["a", "é", "€"]
    assert "".join(stream_text(_Bytes(), "é".encode()[:1])) == "\ufffd"
    with pytest.raises(InputError, match="no chat template"):
        generate.prompt_ids(_Bytes(), "x", chat=True)
