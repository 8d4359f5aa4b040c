"""Blocks found by structure: attention, latent attention, MLP and experts, by the names and shapes of their children.

A block is cut only if every child and bare parameter of it is known; one that is not makes the whole block stay whole,
with the reason, so that nothing is cut by half.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import nn

from lindos.core.rules import Home, Rule
from lindos.parallel.tensor.heads import HEAD_SIZE, KEY_VALUE, QUERY, RATIO, TURNED, WIDTH, input_dim, output_dim

QKV = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("Wq", "Wk", "Wv"),
    ("project_q", "project_k", "project_v"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
)
OUTPUTS = ("o_proj", "out_proj", "dense", "Wo", "c_proj", "attention_out", "out_lin", "o", "wo", "proj", "projection")
OUTSIDE = ("output.dense",)  # of the home's parent: BERT and ViT keep the output apart
FUSED = ("qkv_proj", "Wqkv", "query_key_value", "c_attn", "qkv")
MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("fc_in",), "fc_out"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("w1", "w3"), "w2"),
    (("w1",), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("Wi",), "Wo"),
    (("lin1",), "lin2"),
    (("linear1",), "linear2"),
    (("layer_1",), "layer_2"),
    (("input_linear",), "output_linear"),
    (("proj_up_gate", "proj_up"), "proj_down"),
    (("w_in.w_0", "w_in.w_1"), "w_out"),
    (("intermediate.dense",), "output.dense"),
    (("intermediate",), "output"),
    (("ffn",), "ffn_output"),
    (("0",), "2"),
)
GATES = ("gate_proj", "g_proj", "output_gate")
# Fed by whole inputs and read by indices or after the sum: they stay whole inside a cut attention.
STAY = ("indexer", "rotary_emb", "rotary", "rotary_fn", "embed_positions", "dense_bias", "LayerNorm")
Q_NORM = re.compile(r"(q|query|qk)_?(layer)?_?(norm|ln)")
K_NORM = re.compile(r"(k|key)_?(layer)?_?(norm|ln)")
V_NORM = re.compile(r"(v|value)_?(layer)?_?(norm|ln)")
# Blocks whose forward computes over all heads or features at once, or replaces itself, by class.
ENTANGLED = {
    "TrOCRAttention": "its forward reshapes by the hidden size",
    "BigBirdBlockSparseAttention": "its forward replaces itself by another class on short rows",
    "JetMoeMoA": "its heads are experts that tokens choose",
    "LEDDecoderAttention": "its forward reshapes by the hidden size",
    "ProphetNetAttention": "its mask comes with all heads",
    "MobileBertLMPredictionHead": "it joins its weight with another one",
    "MllamaTextCrossAttention": "text alone does not reach it",
    "BltCrossAttention": "its norms stand before the projections",
    "DiffLlamaAttention": "it mixes the values of distant heads",
}
OUTPUT_NORM = ("attn_sub_norm", "sub_norm", "inner_attn_ln")


class Left(Exception):
    """A block stays whole, and why."""


@dataclass
class Found:
    """So far: rules by exact name, homes of attention and mixers, and blocks left whole with the reason."""

    rules: dict[str, Rule] = field(default_factory=dict)
    homes: dict[str, Home] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        for rule in block.rules:
            self.rules.setdefault(rule.pattern, rule)
        self.homes.update(block.homes)


@dataclass
class Block:
    """Rules of one block in the making.

    Attributes:
        name: of its module.
        module: the module.
        model: all modules by name.
        parts: tp.
    """

    name: str
    module: nn.Module
    model: dict[str, nn.Module]
    parts: int
    rules: list[Rule] = field(default_factory=list)
    homes: dict[str, Home] = field(default_factory=dict)

    def child(self, path: str) -> nn.Module | None:
        return self.model.get(f"{self.name}.{path}" if self.name else path)

    def linear(self, path: str) -> nn.Module | None:
        child = self.child(self.path(path))
        return child if child is not None and is_linear(child) else None

    def path(self, path: str) -> str:
        """Where the product of a child is: in it, or in the one module that it wraps."""
        child = self.child(path)
        wraps = child is not None and not child._parameters and [n for n, _ in child.named_children()] == ["linear"]
        return f"{path}.linear" if wraps else path

    def rule(
        self,
        path: str,
        role: str,
        heads: str | tuple[str, ...] | None = None,
        blocks: int | tuple[int, ...] = 1,
        dim: int = 0,
        own: bool = False,
    ) -> None:
        """One rule; heads are those of this block, or of the match's own parent (`own`)."""
        outside = path.startswith("..")
        path = path if outside else self.path(path)
        full = f"{self.name.rpartition('.')[0]}.{path[2:]}" if outside else f"{self.name}.{path}"
        nested = outside or "." in path
        home = self.name if nested and heads and not own else ""
        self.rules.append(Rule(full.lstrip("."), role, blocks, heads, home, dim, "inferred"))

    def rest(self, *known: str) -> Iterator[str]:
        """Children with parameters, and bare parameters, that are not among the known."""
        for leaf, child in self.module.named_children():
            if leaf not in known and leaf not in STAY and any(True for _ in child.parameters()):
                yield leaf
        for leaf, _ in self.module.named_parameters(recurse=False):
            if leaf not in known and leaf not in STAY:
                yield leaf


def is_linear(module: nn.Module) -> bool:
    """A module whose weight is one product: Linear and its children, Conv1D of gpt2, experts side by side."""
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and weight.dim() in (2, 3)
        and not isinstance(module, nn.Embedding | nn.modules.conv._ConvNd)
        and set(module._parameters) <= {"weight", "bias"}
        and not any(True for _ in module.children())
    )


def outputs(module: nn.Module) -> int:
    return _weight(module).shape[output_dim(module)]


def inputs(module: nn.Module) -> int:
    return _weight(module).shape[input_dim(module)]


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def first(module: nn.Module, names: tuple[str, ...]) -> int:
    """The first attribute among names that is a positive number, on the module or its configuration."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, 0)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def attention(block: Block) -> bool:
    """Separate q, k, v and an output; norms on heads or over all of them, gates, sinks, relative biases."""
    qkv = next((names for names in QKV if all(block.linear(name) is not None for name in names)), None)
    if qkv is None:
        return False
    q, k, v = (block.linear(name) for name in qkv)
    assert q is not None
    assert k is not None
    assert v is not None
    output, path = _output(block)
    if output is None:
        raise Left("no output projection")
    query, key_value, size = _heads(block, q, k, output)
    if outputs(v) % key_value or inputs(output) % query:
        raise Left(f"{query} heads do not divide its projections")
    for name, kind in zip(qkv, ("query", "key_value", "key_value")):
        block.rule(name, "column", kind)
    block.rule(path, "row", "query")
    widths = (query * size, outputs(k), outputs(v))
    _extras(block, (*qkv, path.partition(".linear")[0]), inputs(q), query, key_value, widths)
    _home(block, query, key_value, inputs(output))
    return True


def _heads(block: Block, q: nn.Module, k: nn.Module, output: nn.Module) -> tuple[int, int, int]:
    """Query heads, kv heads and the size of a query head; a query may carry a gate of its own size."""
    size, told = first(block.module, HEAD_SIZE), first(block.module, QUERY)
    query = outputs(q) // size if size else told
    if size and query != told and outputs(q) == 2 * inputs(output):
        query = inputs(output) // size
    if not query or outputs(q) % query:
        raise Left("no head size and no number of heads")
    size = size or outputs(q) // query
    key_value = outputs(k) // size
    if not key_value or query % key_value or outputs(k) % key_value:
        raise Left(f"{query} heads do not divide its projections")
    return query, key_value, size


def _output(block: Block) -> tuple[nn.Module | None, str]:
    for name in OUTPUTS:
        if (found := block.linear(name)) is not None:
            return found, name
    parent = block.name.rpartition(".")[0]
    for name in OUTSIDE:
        found = block.model.get(f"{parent}.{name}")
        if found is not None and is_linear(found):
            return found, f"..{name}"
    return None, ""


def _home(block: Block, query: int, key_value: int, width: int, local: tuple[tuple[str, str], ...] = ()) -> None:
    module, found = block.module, dict(local)
    for names, value, kind in ((QUERY, query, "query"), (KEY_VALUE, key_value, "key_value")):
        for name in names:
            if getattr(module, name, None) == value:
                found.setdefault(name, kind)
    for name in WIDTH:
        if getattr(module, name, None) == width and _reads(type(module), name):
            found.setdefault(name, "query")
    for name in RATIO:
        if hasattr(module, name):
            found.setdefault(name, "ratio")
    arguments = []
    accepted = forward_names(type(module))
    if "alibi" in accepted:  # falcon adds it to the mask, which then has all heads
        arguments += [("alibi", -3, "query"), ("attention_mask", -3, "query")]
    if "position_bias" in accepted and not hasattr(module, "has_relative_attention_bias"):
        arguments.append(("position_bias", -3, "query"))
    block.homes[block.name] = Home(query, key_value, tuple(found.items()), tuple(arguments))


@functools.cache
def _reads(kind: type, name: str) -> bool:
    """Whether any method of a class but its constructor reads an attribute; True where that cannot be told."""
    import inspect

    try:
        methods = re.split(r"\n    def ", inspect.getsource(kind))[1:]
    except (OSError, TypeError):
        return True
    return any(f"self.{name}" in method for method in methods if not method.startswith("__init__"))


@functools.cache
def forward_names(kind: type) -> tuple[str, ...]:
    import inspect

    return tuple(inspect.signature(kind.forward).parameters)


def _extras(
    block: Block, known: tuple[str, ...], hidden: int, query: int, key_value: int, widths: tuple[int, int, int]
) -> None:
    """Roles of what else an attention holds.

    Raises:
        Left: something that is not known.
    """
    for leaf in block.rest(*known):
        child = block.child(leaf)
        if child is None:
            parameter = block.module._parameters[leaf]
            assert parameter is not None
            if tuple(parameter.shape) == (query,):
                block.rule(leaf, "head_parameter", "query")
                continue
            raise Left(f"its parameter {leaf} {list(parameter.shape)} is not known")
        if is_linear(child) and leaf in GATES and inputs(child) == hidden and outputs(child) in (query, widths[0]):
            block.rule(leaf, "column", "query")
        elif isinstance(child, nn.Embedding) and child.weight.shape[1] == query and "bias" in leaf:
            block.rule(leaf, "head_table", "query")
        elif found := re.fullmatch(r"linear_([qkv])_adapter_list", leaf):
            _adapters(block, leaf, "query" if found[1] == "q" else "key_value", 1)
        elif not _norm(block, leaf, child, query, key_value, widths):
            raise Left(f"its child {leaf} ({type(child).__name__}) is not known")


def _adapters(block: Block, leaf: str, heads: str | None, fused: int) -> None:
    """Low-rank additions to a column, one a layer: the first product whole, the second cut like the column."""
    for name, child in block.model[f"{block.name}.{leaf}"].named_children():
        if isinstance(child, nn.Sequential) and len(child) == 2:
            block.rule(f"{leaf}.{name}.1", "column", heads, fused)


def _norm(block: Block, leaf: str, child: nn.Module, query: int, key_value: int, widths: tuple[int, int, int]) -> bool:
    for pattern, width, kind in zip((Q_NORM, K_NORM, V_NORM), widths, ("query", "key_value", "key_value")):
        if pattern.fullmatch(leaf):
            return _norm_of(block, leaf, child, width, width // (query if kind == "query" else key_value), kind)
    if leaf in OUTPUT_NORM:
        return _norm_of(block, leaf, child, widths[0], widths[0] // query, "query")
    return False


def _norm_of(block: Block, leaf: str, child: nn.Module, width: int, size: int, kind: str) -> bool:
    shapes = {tuple(p.shape) for p in child.parameters()}
    if any(True for _ in child.children()) or len(shapes) != 1:
        return False
    (shape,) = shapes
    if shape == (size,) or shape == (1,):
        block.rule(leaf, "head_norm")
    elif shape == (width,):
        block.rule(leaf, "wide_norm", kind)
    elif len(shape) == 2 and shape == (width // size, size):
        for suffix, _ in child.named_parameters(recurse=False):
            block.rule(f"{leaf}.{suffix}", "head_parameter", kind)
    else:
        return False
    return True


def fused_attention(block: Block) -> bool:
    """q, k and v in one product: side by side, or interleaved by head or by kv group."""
    leaf = next((name for name in FUSED if block.linear(name) is not None), None)
    if leaf is None:
        return False
    fused = block.linear(leaf)
    output, path = _output(block)
    if output is None or fused is None:
        raise Left("no output projection")
    module, width, inner = block.module, outputs(fused), inputs(output)
    query = first(module, QUERY)
    if not query or inner % query:
        raise Left("no number of heads")
    size = inner // query
    key_value = (width // size - query) // 2
    if (query + 2 * key_value) * size != width or key_value < 1:
        raise Left(f"{leaf} of {width} outputs is no q, k and v of {query} heads of {size}")
    blocks, heads = _interleaving(block, leaf, query, key_value, size)
    block.rule(leaf, "column", heads, blocks)
    block.rule(path, "row", "query")
    local = []
    if getattr(getattr(module, "config", None), "num_attention_heads", None) == query and not hasattr(
        module, "num_attention_heads"
    ):
        local.append(("config.num_attention_heads", "query"))
    if getattr(module, "kv_dim", None) == key_value * size:
        local.append(("kv_dim", "key_value"))
    if type(module).__name__ == "CodeGenAttention" and not hasattr(module, "mp_num"):
        raise Left("its number of interleaved slices is fixed in its forward")
    if getattr(module, "mp_num", None):
        query = key_value = module.mp_num  # whole slices of the heads it was trained on
        local = [("embed_dim", "query"), ("mp_num", "query")]
    _extras(block, (leaf, path), inputs(fused), query, key_value, (query * size, key_value * size, key_value * size))
    _home(block, query, key_value, inner, tuple(local))
    return True


def _interleaving(
    block: Block, leaf: str, query: int, key_value: int, size: int
) -> tuple[int | tuple[int, ...], str | tuple[str, ...]]:
    """How q, k and v lie in a fused product: its blocks and what each of them is."""
    module = block.module
    sections = ((query * size, key_value * size, key_value * size), ("query", "key_value", "key_value"))
    if getattr(module, "mp_num", None):
        return 1, "query"
    if getattr(module, "new_decoder_architecture", False):
        if key_value < block.parts:
            raise Left(f"{key_value} groups of interleaved q, k and v cannot be shared by {block.parts} ranks")
        return 1, "key_value"
    if leaf == "c_attn" and type(block.child(leaf)).__name__ not in TURNED:
        return sections if getattr(module, "multi_query", True) else (1, "query")
    if leaf == "query_key_value":
        return sections if getattr(module, "multi_query", False) else (1, "query")
    return sections


def latent_attention(block: Block) -> bool:
    """MLA: keys and values from a latent that all heads read, queries plain or from a latent of their own."""
    if block.linear("kv_a_proj_with_mqa") is None or block.linear("kv_b_proj") is None:
        return False
    kv_b, output = block.linear("kv_b_proj"), block.linear("o_proj")
    q = block.linear("q_proj") or block.linear("q_b_proj") or block.linear("q_gate_proj")
    if kv_b is None or output is None or q is None:
        raise Left("a latent attention without q, kv_b_proj or o_proj")
    query = first(block.module, QUERY)
    if not query or outputs(kv_b) % query or inputs(output) % query:
        raise Left("no number of heads")
    known = ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj", "q_a_proj", "q_a_layernorm"]
    block.rule("kv_a_proj_with_mqa", "latent")
    if block.child("kv_a_layernorm") is not None:
        block.rule("kv_a_layernorm", "head_norm")
    block.rule("kv_b_proj", "inner_column", "query")
    for name in ("q_proj", "q_b_proj", "q_gate_proj"):
        if block.linear(name) is not None:
            known.append(name)
            block.rule(name, "column", "query")
    block.rule("o_proj", "row", "query")
    width = inputs(output)
    _extras(block, tuple(known), inputs(block.child("kv_a_proj_with_mqa")), query, query, (width, width, width))  # type: ignore[arg-type]
    _home(block, query, query, width)
    return True


def mlp(block: Block) -> bool:
    """One or two products up, an activation, one product down."""
    for ups, down in MLPS:
        found = [block.linear(name) for name in ups]
        last = block.linear(down)
        if last is None or any(up is None for up in found):
            continue
        if down.isdigit() and not isinstance(block.module, nn.Sequential):
            continue
        inner = inputs(last)
        fused = outputs(found[0]) // inner  # type: ignore[arg-type]
        if any(outputs(up) != fused * inner for up in found) or fused not in (1, 2):  # type: ignore[arg-type]
            continue
        if any(_weight(up).dim() == 3 and inputs(up) != outputs(last) for up in found):  # type: ignore[arg-type]
            raise Left("its experts do not end in the width that they begin with: their weights may be turned")
        if getattr(block.module, "activation_sparsity", 0) > 0:
            raise Left("it drops inner features by their mean and deviation")
        for name in ups:
            block.rule(name, "column", None, fused)
        block.rule(down, "row")
        _inside(block, (*ups, down), inner, fused)
        return True
    return False


def _inside(block: Block, known: tuple[str, ...], inner: int, fused: int) -> None:
    """What stands between the products: a norm over the inner features, what an activation learns, adapters.

    Raises:
        Left: something that is not known.
    """
    hidden = inputs(block.child(block.path(known[0])))  # type: ignore[arg-type]
    rest = [leaf for leaf in block.rest(*(name.split(".")[0] for name in known)) if not leaf.endswith("_adapter_list")]
    for leaf in block.module._modules:
        if leaf.endswith("_adapter_list"):
            _adapters(block, leaf, None, fused)
    if any(_holds_products(block.child(leaf)) for leaf in rest):
        return  # a layer with more in it than this MLP: what it holds itself is on the residual stream
    for leaf, child in block.module.named_children():
        if "norm" in leaf and leaf not in known and not any(True for _ in child.parameters()):
            raise Left(f"its {leaf} has no parameters to be found by, and may be over all inner features")
    for leaf in rest:
        child = block.child(leaf)
        shapes = {tuple(p.shape) for p in ([block.module._parameters[leaf]] if child is None else child.parameters())}  # type: ignore[union-attr]
        if shapes == {(inner,)} and (inner != hidden or leaf == "ffn_sub_norm") and (child is None or "norm" in leaf):
            block.rule(leaf, *(("head_parameter",) if child is None else ("wide_norm",)))
        elif child is not None and re.fullmatch(r"act(_fn|ivation)?(_fn)?", leaf):
            block.rule(leaf, "activation_parameter")
        elif shapes != {(hidden,)} or inner == hidden:
            raise Left(f"its {leaf} is not known")


def _holds_products(module: nn.Module | None) -> bool:
    return module is not None and any(is_linear(inner) for inner in module.modules())


def experts(block: Block) -> bool:
    """Fused experts in parameters of three dims, or dbrx's of two."""
    own = block.module._parameters
    if {"w1", "v1", "w2"} <= set(own) and getattr(block.module, "ffn_hidden_size", 0):
        inner = int(block.module.ffn_hidden_size)  # type: ignore[arg-type]
        for leaf in ("w1", "v1", "w2"):
            count = own[leaf].shape[0] // inner  # type: ignore[union-attr]
            block.rule(leaf, "head_parameter", ("query",) * count, count)
        parent = block.name.rpartition(".")[0]
        block.homes[block.name] = block.homes[parent] = Home(inner, inner, (("ffn_hidden_size", "query"),))
        block.rules.append(Rule(parent, "experts", source="inferred"))
        return True
    dims = {leaf: p.dim() for leaf, p in own.items() if p is not None}
    if dims.get("down_proj") != 3 or not {"gate_up_proj", "up_proj"} & set(dims):
        return False
    block.rules.append(Rule(block.name, "experts", source="inferred"))
    return True


MAKERS: tuple[Callable[[Block], bool], ...] = (latent_attention, attention, fused_attention, experts, mlp)
