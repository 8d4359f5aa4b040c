"""What tensor parallelism says about a model's rules: what stays whole, what it refuses, what it cannot read."""

import json

import pytest
import torch

import lindos
from lindos.core.errors import InputError, LindosError, RefusedError
from lindos.hf import models
from lindos.hf.twin import twin

LITTLE = {"tensor": {"model.embed_tokens": "vocabulary_embedding", "lm_head": "vocabulary_head",
                     "model.layers.*.mlp.gate_proj": "column", "model.layers.*.mlp.up_proj": "column",
                     "model.layers.*.mlp.down_proj": "row"}}  # fmt: skip
LESS = {"tensor": {"model.embed_tokens": "vocabulary_embedding", "lm_head": "vocabulary_head"}}


def described(world, rules, allow):
    torch.set_num_threads(1)
    booster = lindos.Booster(lindos.HybridParallel(tp=2, rules=rules), allow=allow)
    try:
        booster.boost(twin("llama", dtype=torch.float32, tied=False))
    except LindosError as error:
        return type(error).__name__, str(error)
    return "boosted", booster.describe()


def test_what_stays_whole_is_listed_with_its_bytes(ranks):
    (verdict, text), _ = ranks.run(described, 2, LITTLE, ())
    assert verdict == "boosted"
    assert "left whole on every rank of tp: " in text
    assert "model.layers.*.self_attn.q_proj" in text


def test_leaving_most_of_a_model_whole_is_refused_unless_allowed(ranks):
    for verdict, text in ranks.run(described, 2, LESS, ()):
        assert verdict == "RefusedError"
        assert "100%" in text
        assert 'allow=("whole",)' in text
    assert [verdict for verdict, _ in ranks.run(described, 2, LESS, ("whole",))] == ["boosted"] * 2


def test_a_rule_that_matches_nothing_or_twice_is_refused_on_all_ranks(ranks):
    nothing = {"tensor": {**LITTLE["tensor"], "model.layers.*.mlp.gate": "column"}}
    twice = {"tensor": {**LITTLE["tensor"], "model.layers.0.mlp.up_proj": "column"}}
    for rules, words in ((nothing, "matches no module"), (twice, "matched twice")):
        for verdict, text in ranks.run(described, 2, rules, ()):
            assert verdict == "RulesError"
            assert words in text


def test_a_folder_with_code_of_its_own_is_refused(tmp_path):
    config = {"model_type": "theirs", "auto_map": {"AutoModelForCausalLM": "modeling.Theirs"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedError, match="auto_map"):
        lindos.from_pretrained(tmp_path)


def test_a_configuration_whose_numbers_contradict_each_other_is_bad_input(tmp_path):
    config = {"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="65"):
        lindos.from_pretrained(tmp_path)


def test_a_type_that_this_transformers_does_not_know_is_bad_input(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama_of_tomorrow"}))
    with pytest.raises(InputError, match="llama_of_tomorrow"):
        models.config_of(str(tmp_path))
