"""Attention on local heads: what a module's own forward reads about its heads becomes local. A closed list."""

from __future__ import annotations

from torch import nn

from lindos.parallel.tensor.roles import Heads

QUERY = ("num_heads", "num_attention_heads", "n_head", "n_heads")
KEY_VALUE = ("num_key_value_heads", "num_kv_heads")
RATIO = ("num_key_value_groups",)
WIDTH = ("split_size", "embed_dim", "all_head_size")


def localise(model: nn.Module, heads: dict[str, Heads], rank: int) -> None:
    """Set head counts, the kv ratio and fused widths of every cut attention to this rank's."""
    modules = dict(model.named_modules())
    for home in dict.fromkeys(name.rpartition(".")[0] for name in heads):
        its = next(h for name, h in heads.items() if name.rpartition(".")[0] == home)
        query, ratio = its.counts()[rank], its.local_ratio(rank)
        _set(modules[home], QUERY, its.query, query)
        _set(modules[home], KEY_VALUE, its.key_value, query // ratio)
        _set(modules[home], WIDTH, its.query * its.size, query * its.size)
        for name in RATIO:
            if hasattr(modules[home], name):
                setattr(modules[home], name, ratio)


def _set(module: nn.Module, names: tuple[str, ...], whole: int, local: int) -> None:
    for name in names:
        if getattr(module, name, None) == whole:
            setattr(module, name, local)
