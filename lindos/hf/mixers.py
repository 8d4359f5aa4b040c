"""Mixers that are no attention: state space, linear attention, convolution, recurrence. Cut by heads or channels."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lindos.core.rules import Home
from lindos.hf.blocks import Block, Left, inputs, outputs


def _has(block: Block, *paths: str) -> bool:
    return all(
        block.child(path) is not None or path in block.module._parameters or path in block.module._buffers
        for path in paths
    )


def _only(block: Block, *known: str) -> None:
    left = list(block.rest(*known))
    if left:
        raise Left(f"its {left[0]} is not known")


def _number(block: Block, name: str) -> int:
    value = getattr(block.module, name, None)
    if not isinstance(value, int) or value < 1:
        raise Left(f"it tells no {name}")
    return value


def _home(block: Block, query: int, key_value: int, *local: tuple[str, str]) -> None:
    found = tuple((name, what) for name, what in local if hasattr(block.module, name))
    block.homes[block.name] = Home(query, key_value, found)


def mamba(block: Block) -> bool:
    """Selective state space by channels; B and C are read by all of them."""
    names = ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj")
    if not _has(block, *names):
        return False
    inner = _number(block, "intermediate_size")
    _only(block, *names, "dt_layernorm", "b_layernorm", "c_layernorm")
    block.rule("in_proj", "column", "query", 2)
    block.rule("conv1d", "convolution", "query")
    block.rule("x_proj", "whole_output", "query")
    block.rule("dt_proj", "inner_column", "query")
    for name in ("A_log", "D"):
        block.rule(name, "head_parameter", "query")
    for name in ("dt_layernorm", "b_layernorm", "c_layernorm"):
        if block.child(name) is not None:
            block.rule(name, "head_norm")
    block.rule("out_proj", "row", "query")
    _home(block, inner, inner, ("intermediate_size", "query"))
    return True


def mamba2(block: Block) -> bool:
    """State space by heads; B and C belong to groups of heads, shared by neighbours where groups are few."""
    names = ("in_proj", "conv1d", "A_log", "D", "dt_bias", "out_proj")
    if not _has(block, *names) or not hasattr(block.module, "n_groups"):
        return False
    heads, groups, inner = (_number(block, n) for n in ("num_heads", "n_groups", "intermediate_size"))
    states = groups * _number(block, "ssm_state_size")
    _only(block, *names, "norm")
    blocks, kinds = (inner, inner, states, states, heads), ("query", "query", "key_value", "key_value", "query")
    block.rule("in_proj", "column", kinds, blocks)
    block.rule("conv1d", "convolution", kinds[1:4], blocks[1:4])
    for name in ("A_log", "D", "dt_bias"):
        block.rule(name, "head_parameter", "query")
    if "mup_vector" in block.module._buffers:
        block.rule("mup_vector", "head_parameter", kinds, blocks, dim=2)
    norm = block.child("norm")
    if norm is not None and any(True for _ in norm.parameters()):
        grouped = any(hasattr(norm, name) for name in ("group_size", "n_groups"))
        block.rule("norm", "group_norm" if grouped else "wide_norm", "query")
    block.rule("out_proj", "row", "query")
    local = (("num_heads", "query"), ("n_groups", "key_value"), ("intermediate_size", "query"), ("conv_dim", "=conv1d"))
    _home(block, heads, groups, *local, ("groups_time_state_size", "key_value"))
    return True


def delta_net(block: Block) -> bool:
    """Gated delta rule: key heads shared by groups of value heads."""
    if not _has(block, "conv1d", "A_log", "dt_bias") or not hasattr(block.module, "num_v_heads"):
        return False
    values, keys = _number(block, "num_v_heads"), _number(block, "num_k_heads")
    key, value = _number(block, "key_dim"), _number(block, "value_dim")
    three, kinds = (key, key, value), ("key_value", "key_value", "query")
    known = ["conv1d", "A_log", "dt_bias"]

    def columns(**found: str) -> None:
        for name, kind in found.items():
            if block.linear(name) is None:
                raise Left(f"it has no {name}")
            block.rule(name, "column", kind)
        known.extend(found)

    if _has(block, "in_proj_qkvz"):
        if keys < block.parts:
            raise Left(f"{keys} interleaved key heads cannot be shared by {block.parts} ranks")
        columns(in_proj_qkvz="key_value", in_proj_ba="key_value")
    elif _has(block, "in_proj_qkv"):
        block.rule("in_proj_qkv", "column", kinds, three)
        known.append("in_proj_qkv")
        columns(in_proj_z="query", in_proj_b="query", in_proj_a="query")
    else:
        columns(q_proj="key_value", k_proj="key_value", v_proj="query", g_proj="query", a_proj="query", b_proj="query")
    block.rule("conv1d", "convolution", kinds, three)
    for name in ("A_log", "dt_bias"):
        block.rule(name, "head_parameter", "query")
    for name, role, kind in (("norm", "head_norm", None), ("o_norm", "head_norm", None), ("out_proj", "row", "query"),
                             ("o_proj", "row", "query")):  # fmt: skip
        if block.child(name) is not None:
            block.rule(name, role, kind)
            known.append(name)
    _only(block, *known)
    local = (("num_v_heads", "query"), ("num_k_heads", "key_value"), ("key_dim", "key_value"), ("value_dim", "query"))
    _home(block, values, keys, *local, ("conv_dim", "=conv1d"))
    return True


def kimi_delta(block: Block) -> bool:
    """Delta attention of one head count: q, k, v through one convolution, a low-rank forget gate."""
    if not _has(block, "q_proj", "k_proj", "v_proj", "conv1d", "forget_gate", "b_proj", "o_norm", "o_proj"):
        return False
    heads, width = _number(block, "num_heads"), _number(block, "qkv_dim")
    known = ["q_proj", "k_proj", "v_proj", "conv1d", "forget_gate", "b_proj", "o_norm", "o_proj"]
    for name in ("q_proj", "k_proj", "v_proj", "b_proj", "g_proj", "g_b_proj"):
        child = block.linear(name)
        if child is not None:
            if outputs(child) % heads:
                raise Left(f"its {name} is not cut by heads")
            block.rule(name, "column", "query")
            known.append(name)
    known += ["g_a_proj"]
    block.rule("conv1d", "convolution", ("query",) * 3, (width,) * 3)
    gate = block.child("forget_gate")
    assert gate is not None
    alone = hasattr(gate, "num_heads")  # then it counts heads by itself
    for name in ("f_b_proj", "f_proj"):
        if hasattr(gate, name):
            block.rule(f"forget_gate.{name}", "column", "query", own=alone)
    for name, parameter in gate.named_parameters(recurse=False):
        whole = parameter.numel() == parameter.shape[-1] if parameter.dim() else False
        dim = parameter.dim() - 1 if whole else next((d for d, n in enumerate(parameter.shape) if n % heads == 0), 0)
        block.rule(f"forget_gate.{name}", "head_parameter", "query", dim=dim, own=alone)
    block.rule("o_norm", "head_norm")
    block.rule("o_proj", "row", "query")
    _only(block, *known)
    _home(block, heads, heads, ("num_heads", "query"), ("qkv_dim", "query"), ("conv_dim", "=conv1d"))
    if alone:
        block.homes[f"{block.name}.forget_gate"] = Home(heads, heads, (("num_heads", "query"),))
    return True


def short_convolution(block: Block) -> bool:
    """Gated depthwise convolution over channels."""
    if not _has(block, "conv", "in_proj", "out_proj"):
        return False
    into, conv, out = block.linear("in_proj"), block.child("conv"), block.linear("out_proj")
    if into is None or out is None or not isinstance(conv, nn.Conv1d) or outputs(into) != 3 * inputs(out):
        return False
    _only(block, "conv", "in_proj", "out_proj")
    block.rule("in_proj", "column", None, 3)
    block.rule("conv", "convolution")
    block.rule("out_proj", "row")
    return True


def recurrence(block: Block) -> bool:
    """RG-LRU: channels in blocks, each with a gate matrix of its own."""
    names = ("linear_x", "linear_y", "linear_out", "conv_1d", "rg_lru")
    if not _has(block, *names):
        return False
    _only(block, *names)
    inner = f"{block.name}.rg_lru"
    gate = block.model[inner]
    heads = int(gate.num_attention_heads)  # type: ignore[arg-type]
    for name in ("linear_x", "linear_y"):
        block.rule(name, "column", "query")
    block.rule("conv_1d", "convolution", "query")
    for name, _ in gate.named_parameters(recurse=False):
        block.rule(f"rg_lru.{name}", "head_parameter", "query", own=True)
    block.rule("linear_out", "row", "query")
    _home(block, heads, heads, ("lru_width", "query"))
    block.homes[inner] = Home(heads, heads, (("num_attention_heads", "query"),))
    return True


def rwkv(block: Block) -> bool:
    """RWKV: time mixing by channels; its channel mixing's key and value."""
    if not _has(block, "key", "value", "receptance"):
        return False
    mixes = [name for name in block.module._parameters if name.startswith("time_mix")]
    if _has(block, "output", "time_decay", "time_first"):
        _only(block, "key", "value", "receptance", "output", "time_decay", "time_first", *mixes)
        width = _number(block, "attention_hidden_size")
        for name in ("key", "value", "receptance"):
            block.rule(name, "column", "query")
        for name in ("time_decay", "time_first"):
            block.rule(name, "head_parameter", "query")
        block.rule("output", "row", "query")
        _home(block, width, width, ("attention_hidden_size", "query"))
    else:
        _only(block, "key", "value", "receptance", *mixes)
        block.rule("key", "column")
        block.rule("value", "row")
    return True


def xlstm(block: Block) -> bool:
    """mLSTM by heads."""
    names = ("q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact", "multihead_norm", "out_proj")
    if not _has(block, *names):
        return False
    _only(block, *names)
    heads = int(block.module.config.num_heads)  # type: ignore[union-attr,arg-type]
    for name in names[:6]:
        block.rule(name, "column", "query")
    block.rule("multihead_norm", "group_norm", "query")
    block.rule("out_proj", "row", "query")
    local = (("v_dim", "query"), ("qk_dim", "query"), ("config.num_heads", "query"))
    block.homes[block.name] = Home(heads, heads, local)
    return True


MAKERS: tuple[Callable[[Block], bool], ...] = (
    mamba, mamba2, delta_net, kimi_delta, short_convolution, recurrence, rwkv, xlstm,
)  # fmt: skip
