"""Rules by structure: what each kind of block becomes, what stays whole and why."""

import re

import pytest
import torch
from torch import nn

from lindos.core.errors import LayoutError, RefusedError
from lindos.hf import proven, rules
from lindos.hf.infer import infer
from lindos.hf.rules import STYLES, rules_of
from lindos.hf.twin import twin
from lindos.parallel.tensor.kind import Tensor


def roles(model_type: str, parts: int = 2, **sizes) -> dict:
    """Rules of a type's twin, by the tail of their names behind the layer number."""
    found = infer(twin(model_type, dtype=torch.float32, **sizes), parts)
    return {re.sub(r"^.*?\.\d+\.", "", rule.pattern): rule for rule in found.rules}


@pytest.mark.parametrize(
    ("model_type", "tail", "role", "heads"),
    [
        ("llama", "self_attn.q_proj", "column", "query"),
        ("llama", "self_attn.k_proj", "column", "key_value"),
        ("llama", "mlp.down_proj", "row", None),
        ("llama", "model.embed_tokens", "vocabulary_embedding", None),
        ("qwen3", "self_attn.q_norm", "head_norm", None),
        ("olmo2", "self_attn.k_norm", "wide_norm", "key_value"),
        ("gpt2", "attn.c_attn", "column", ("query", "key_value", "key_value")),
        ("bloom", "self_attention.query_key_value", "column", "query"),
        ("falcon", "self_attention.query_key_value", "column", ("query", "key_value", "key_value")),
        ("phi3", "self_attn.qkv_proj", "column", ("query", "key_value", "key_value")),
        ("deepseek_v3", "self_attn.kv_a_proj_with_mqa", "latent", None),
        ("deepseek_v3", "self_attn.kv_b_proj", "inner_column", "query"),
        ("mixtral", "mlp.experts", "experts", None),
        ("gpt_oss", "self_attn.sinks", "head_parameter", "query"),
        ("apertus", "mlp.act_fn", "activation_parameter", None),
        ("mamba", "mixer.x_proj", "whole_output", "query"),
        ("mamba", "mixer.dt_proj", "inner_column", "query"),
        ("mamba2", "mixer.norm", "group_norm", "query"),
        ("mamba2", "mixer.conv1d", "convolution", ("query", "key_value", "key_value")),
        ("qwen3_next", "linear_attn.in_proj_qkvz", "column", "key_value"),
        ("lfm2_moe", "conv.conv", "convolution", None),
        ("recurrent_gemma", "temporal_block.rg_lru.input_gate_weight", "head_parameter", "query"),
        ("rwkv", "attention.time_decay", "head_parameter", "query"),
        ("bert", "output.dense", "row", None),
        ("bert", "attention.output.dense", "row", "query"),
        ("cpmant", "self_att.self_attention.project_q", "column", "query"),
        ("moshi", "self_attn.q_proj.linear", "column", "query"),
        ("zamba2", "shared_transformer.feed_forward.gate_up_proj_adapter_list.0.1", "column", None),
    ],
)
def test_a_block_gets_its_roles(model_type, tail, role, heads):
    rule = roles(model_type).get(tail)
    assert rule is not None
    assert (rule.role, rule.heads) == (role, heads)


class Attention(nn.Module):
    def __init__(self, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.head_dim = 8
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(24, 32), nn.Linear(24, 16), nn.Linear(24, 16)
        self.o_proj = nn.Linear(32, 24)
        if extra is not None:
            self.extra = extra

    def forward(self, hidden_states):
        return hidden_states


def test_an_unknown_child_leaves_its_block_whole_and_is_named():
    model = nn.Sequential(Attention(), Attention(nn.Linear(24, 7)))
    found = infer(model, 2)
    assert {rule.pattern for rule in found.rules} == {f"0.{name}_proj" for name in "qkvo"}
    assert "extra" in found.left["1"]


def test_heads_that_tp_cannot_cut_are_an_error_that_says_what_fits():
    with pytest.raises(LayoutError, match=r"0: tp=3 cannot cut 4 query heads over 2 kv heads. Use tp in \[1, 2, 4\]"):
        infer(nn.Sequential(Attention()), 3)


def test_kinds_that_a_forward_entangles_stay_whole_by_name():
    found = infer(twin("trocr", dtype=torch.float32), 2)
    assert all("reshapes" in why for name, why in found.left.items() if name.endswith("attn"))
    assert any(rule.pattern.endswith("fc1") for rule in found.rules)


def test_towers_for_images_stay_whole():
    found = infer(twin("gemma3", dtype=torch.float32), 2)
    assert not any("vision_tower" in rule.pattern for rule in found.rules)
    assert any("language_model.layers.0.self_attn.q_proj" in rule.pattern for rule in found.rules)


def test_an_unknown_style_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(rules, "plan_of", lambda model: {"layers.*.x": "colwise_of_tomorrow"})
    with pytest.raises(RefusedError, match="colwise_of_tomorrow"):
        rules_of(nn.Linear(2, 2), 2)


def test_every_style_of_this_transformers_is_known():
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    assert set(ALL_PARALLEL_STYLES.keys()) <= STYLES


def lines(model, parts: int = 2) -> frozenset[str]:
    read = Tensor(infer(model, parts)).read(model, parts)
    return proven.lines_of(model, read.rules, read.heads)


def test_depth_and_sizes_do_not_change_the_lines_of_a_type():
    small, large = twin("llama", dtype=torch.float32), twin("llama", dtype=torch.float32, layers=4, heads=8)
    assert lines(small) == lines(large)
    assert lines(twin("llama", dtype=torch.float32, heads=8, kv_heads=2)) == lines(large)
    assert lines(twin("llama", dtype=torch.float32, heads=6, kv_heads=3)) != lines(large)
    assert lines(small) != lines(twin("qwen3", dtype=torch.float32))


def test_another_class_or_flag_is_another_line():
    model = twin("llama", dtype=torch.float32)
    before = lines(model)
    attention = model.model.layers[0].self_attn
    attention.__class__ = type("Mixing", (type(attention),), {"forward": type(attention).forward})
    assert not lines(model) <= before
    plain, alibi = (twin("falcon", dtype=torch.float32, alibi=value) for value in (False, True))
    assert not lines(alibi) <= lines(plain)


class Mlp(nn.Module):
    def __init__(self, **parts) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(24, 40), nn.Linear(24, 40), nn.Linear(40, 24)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return x


def test_what_an_mlp_learns_besides_its_products_is_known_or_leaves_it_whole():
    scale, inner = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(40))
    model = nn.Sequential(Mlp(), Mlp(scale=scale), Mlp(inner=inner), Mlp(sub_norm=nn.LayerNorm(40)), Mlp(x=nn.PReLU(3)))
    found = infer(model, 2)
    assert {name for name in found.left} == {"1", "4"}
    roles_of = {rule.pattern: rule.role for rule in found.rules}
    assert roles_of["2.inner"] == "head_parameter"
    assert roles_of["3.sub_norm"] == "wide_norm"


def test_a_mixer_norm_without_groups_is_over_the_whole_width():
    """As mamba2 and bamba were until transformers 5.20: cut by groups, the loss would be silently wrong."""
    model = twin("mamba2", dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "group_size"):
            del module.group_size
    found = {rule.role for rule in infer(model, 2).rules if rule.pattern.endswith("mixer.norm")}
    assert found == {"wide_norm"}


def test_slices_that_a_forward_fixes_leave_attention_whole():
    model = twin("codegen", dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "mp_num"):
            del module.mp_num
    found = infer(model, 2)
    assert "its number of interleaved slices is fixed in its forward" in set(found.left.values())
    assert not any(".attn." in rule.pattern for rule in found.rules)


def test_weights_read_past_their_module_leave_it_whole():
    found = infer(twin("bloom", dtype=torch.float32, slow_but_exact=True, pretraining_tp=2), 2)
    assert set(found.left.values()) == {"slow_but_exact reads its weights in slices"}
    assert not any(rule.role == "row" for rule in found.rules)


class Grouped(nn.Module):
    """Experts side by side: [experts, a, b]."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape))


class AriaGroupedExpertsGemm(Grouped):
    """Known by its class to be [experts, in, out]."""


@pytest.mark.parametrize(("kind", "known"), [(Grouped, False), (AriaGroupedExpertsGemm, True)])
def test_experts_that_may_be_turned_are_cut_only_where_the_class_is_known(kind, known):
    inner = nn.Module()
    inner.fc1, inner.fc2 = kind(4, 6, 20), kind(4, 10, 6)
    model = twin("llama", dtype=torch.float32)
    model.model.layers[0].mlp = inner
    found = infer(model, 2)
    mine = {rule.pattern.rpartition(".")[2]: (rule.role, rule.blocks) for rule in found.rules if ".fc" in rule.pattern}
    assert mine == ({"fc1": ("column", 2), "fc2": ("row", 1)} if known else {})
    assert known or "may be turned" in found.left["model.layers.0.mlp"]
