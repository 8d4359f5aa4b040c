"""The twin: a model of any Hugging Face causal type, small enough for a test and with the type's own pattern.

A twin starts from the default configuration of its type and only sizes shrink: kinds of layers, tied or separate
embeddings, activations, norms, experts, sliding windows, softcaps, biases and partial rotaries stay. Its sizes are
pairwise different, so nothing in lindos can be told apart by shape alone, and no parameter keeps a special value
(a norm of ones, a bias of zeros), because special values hide faults.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lindos.core.errors import InputError, RefusedError, nearest

# Generic word -> the names that configurations give it.
WORDS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_dim", "emb_dim", "lru_width"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers",
               "num_blocks", "encoder_layers", "num_encoder_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads",
              "num_decoder_attention_heads", "encoder_attention_heads", "num_encoder_attention_heads",
              "swa_num_attention_heads", "num_attention_heads_per_layer"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads", "num_query_groups"),
    "head_dim": ("head_dim", "d_head", "dim_head", "swa_head_dim", "attention_head_size", "query_pre_attn_scalar"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "dim_ff",
                     "ffn_hidden_size", "d_inner", "feed_forward_size", "dense_intermediate_size"),
    "expert_intermediate": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "shared_intermediate": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                            "shared_intermediate_size", "intermediate_size_mlp"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
    "vocabulary": ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length",
                  "context_length", "max_target_positions"),
    "window": ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "local_attention",
               "attention_chunk_size"),
    "tied": ("tie_word_embeddings",),
}  # fmt: skip

SIZES = {"layers": 2, "heads": 4, "intermediate": 112, "expert_intermediate": 40, "shared_intermediate": 56,
         "experts": 4, "top_k": 2, "vocabulary": 131, "positions": 128, "window": 5}  # fmt: skip

# Further sizes of single families. A default below the value stays (one group stays one group).
SMALL = {
    "q_lora_rank": 20, "kv_lora_rank": 28, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "n_group": 2, "num_expert_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "index_block_size": 4, "index_topk_blocks": 2,
    "mamba_d_state": 10, "mamba_n_heads": 4, "mamba_num_heads": 4, "mamba_d_head": 24, "mamba_head_dim": 24,
    "mamba_d_ssm": 96, "mamba_dt_rank": 6, "time_step_rank": 6, "state_size": 10, "ssm_state_size": 10,
    "mamba_n_groups": 2, "n_groups": 2, "mamba_chunk_size": 8, "chunk_size": 8, "n_mamba_heads": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 14,
    "linear_num_heads": 4, "linear_head_dim": 12, "rotary_dim": 8, "block_size": 8, "embedding_size": 36,
    "hidden_size_per_layer_input": 12, "laurel_rank": 6, "num_kv_shared_layers": 0, "o_lora_rank": 20, "o_groups": 2,
    "d_rel": 4, "rel_extent": 16, "log_scaling_n_floor": 8, "floor_scale": 8, "no_rope_layer_interval": 2,
    "zero_expert_num": 2, "router_hidden_size": 24, "num_layers_per_stack": 2, "gated_norm_rank": 6,
    "keep_window_size": 8, "block_multiple_of": 8, "kv_channels": 16, "hc_lowrank": 12, "hc_sinkhorn_iters": 3,
    "input_embedding_size": 36, "loop_gate_rank": 6, "output_embedding_size": 40, "pronunciation_embed_dim": 20,
    "pronunciation_vocab_size": 31, "shape_embed_dim": 28, "shape_vocab_size": 37, "image_size": 32, "patch_size": 16,
    "num_mel_bins": 8, "max_source_positions": 20, "encoder_hash_byte_group_vocab": 50,
    "local_attention_window_len": 8, "position_bias_num_buckets": 16, "position_bias_max_distance": 64, "depth": 2,
    "prompt_length": 4, "codebook_size": 64, "adapter_rank": 6, "scale_emb": 4, "dim_model_base": 16,
    "layer_group_size": 2,
}  # fmt: skip

# By class of configuration: kinds of layers that follow from a period instead of a list, sizes that bind each other
# (functions of the generic sizes), and defaults that transformers itself cannot build.
SPECIAL: dict[str, dict[str, Any]] = {
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "BambaConfig": {"mamba_d_head": lambda sizes: sizes["hidden"] // 2},
    "GraniteMoeHybridConfig": {"mamba_d_head": lambda sizes: sizes["hidden"] // 2},
    "FalconH1Config": {"mamba_d_head": 24},
    "Mamba2Config": {"head_dim": lambda sizes: 2 * sizes["hidden"] // sizes["heads"]},
    "XLNetConfig": {"d_head": lambda sizes: sizes["hidden"] // sizes["heads"]},
    "HeliumConfig": {"head_dim": lambda sizes: sizes["hidden"] // sizes["heads"]},
    "Dots1Config": {"n_shared_experts": 1, "n_routed_experts": lambda sizes: sizes["experts"]},
    "Lfm2MoeConfig": {"layer_types": lambda sizes: (["conv", "full_attention"] * sizes["layers"])[: sizes["layers"]]},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "XmodConfig": {"default_language": "en_XX"},
}

# Fields that list the layers of one kind by number.
NUMBERED = ("moe_layers", "full_attn_idxs", "hybrid_layer_ids", "mlp_only_layers", "ple_layer_ids")
LARGEST = 5_000_000  # parameters of a twin: more means that some size has no entry here


def types() -> list[str]:
    """Every model type that transformers can build as a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def twin_config(model_type: Any, **overrides: Any):
    """The default configuration of a type (or a given configuration), scaled down with its pattern kept.

    Args:
        model_type: A causal type such as "llama", or a configuration to scale.
        overrides: Generic words (`heads=8, kv_heads=2, vocabulary=131, tied=True, layers=4, hidden=64`; `WORDS` lists
            them all) or the configuration's own field names.

    Raises:
        InputError: A word that is unknown, or that this type has no field for.
        RefusedError: transformers cannot make this configuration.

    Example:
        >>> twin_config("gemma3_text").layer_types
        ['sliding_attention', 'full_attention']
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = {}
    if isinstance(model_type, str):
        if model_type not in types():
            raise InputError(
                f"{model_type!r} is not a causal model type of transformers: {nearest(model_type, types())}"
            )
        base = _attempt(model_type, CONFIG_MAPPING[model_type])
    else:
        base, given = model_type, model_type.to_diff_dict()
    known = {base.attribute_map.get(name, name): value for name, value in overrides.items() if name not in WORDS}
    words = {name: value for name, value in overrides.items() if name in WORDS}
    fields = _all_fields(base)
    for name in known:
        if name not in fields:
            raise InputError(
                f"twin override {name!r} is no field of {base.model_type}: {nearest(name, [*WORDS, *fields])}"
            )
    for word in words:
        if not any(name in fields for name in WORDS[word]):
            raise InputError(
                f"{base.model_type} has no field for {word}= (one of {', '.join(WORDS[word])}). Leave it out"
            )
    changes = _scaled(base, words)
    return _attempt(base.model_type, type(base), **{**_essential(given), **changes, **known})


def twin(model_type: Any, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> torch.nn.Module:
    """A small model of the given type: same seed, same values; in training mode, without dropout.

    A configuration is built as it is; a type goes through `twin_config` with the overrides. Values are drawn in fp64
    and rounded to `dtype`, so twins of one seed agree over dtypes. Experts run eagerly, since the grouped product
    refuses fp64.
    """
    if isinstance(model_type, str):
        config = twin_config(model_type, **overrides)
    elif overrides:
        raise InputError(f"twin(config) builds the configuration as it is, got {sorted(overrides)} too. "
                         "Give them to twin_config(config, ...) and build its result")  # fmt: skip
    else:
        config = model_type
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(config).to(torch.float64)
        count = sum(parameter.numel() for parameter in model.parameters())
        if count > LARGEST and isinstance(model_type, str):
            raise RefusedError(
                f"no twin of {model_type}: it must have at most {LARGEST:,} parameters, got {count:,}. "
                "Give the sizes of its own fields as overrides"
            )
        _randomise(model, torch.Generator().manual_seed(seed + 1))
    model.config.dtype = dtype
    return model.to(dtype).train()


def batch(config: Any, rows: int, length: int, seed: int, ragged: bool = True) -> dict[str, torch.Tensor]:
    """Random token ids with right padding and labels, each row with its own number of both.

    **Shapes**: input_ids, attention_mask, labels [rows, length]. A label is the token of its own position (the shift
    happens inside the loss), or -100 on padding and, if `ragged`, at some positions of every row.
    """
    text = config.get_text_config()
    special = _special_ids(config.to_dict())
    ordinary = torch.tensor([i for i in range(text.vocab_size) if i not in special])
    draw = torch.Generator().manual_seed(seed)
    input_ids = ordinary[torch.randint(len(ordinary), (rows, length), generator=draw)]
    mask = torch.ones(rows, length, dtype=torch.long)
    labels = input_ids.clone()
    if ragged:
        valid = torch.randint((length + 1) // 2, length + 1, (rows,), generator=draw)
        valid[torch.randint(rows, (1,), generator=draw)] = length
        mask = (torch.arange(length) < valid[:, None]).long()
        dropped = torch.rand(rows, length, generator=draw) < torch.rand(rows, 1, generator=draw) * 0.4
        labels[dropped | (mask == 0)] = -100
        pad = getattr(text, "pad_token_id", None)
        input_ids[mask == 0] = pad if isinstance(pad, int) and 0 <= pad < text.vocab_size else 0
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def _attempt(model_type: str, make, *args: Any, **kwargs: Any):
    """What transformers makes, or a refusal that carries its reason."""
    try:
        return make(*args, **kwargs)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise RefusedError(f"no twin of {model_type}: transformers raises {type(error).__name__}: {text}") from error


def _sub_configs(config: Any) -> dict[str, Any]:
    """The configurations inside a configuration, by field."""
    found = {name: getattr(config, name, None) for name in config.sub_configs}
    return {name: value for name, value in found.items() if value is not None}


def _all_fields(config: Any) -> set[str]:
    """Names of the fields of a configuration and of those inside it that describe its text model."""
    own = set(config.to_dict())
    inner = [value for name, value in _sub_configs(config).items() if name in ("text_config", "attn_config", "decoder")]
    return own.union(*(_all_fields(value) for value in inner))


def _essential(fields: dict[str, Any]) -> dict[str, Any]:
    """What a given configuration says about the model, without where it came from."""
    noise = ("model_type", "transformers_version", "architectures", "dtype", "_name_or_path",
             "quantization_config", "per_layer_config")  # fmt: skip
    return {name: value for name, value in fields.items() if name not in noise}


def _word_of(name: str) -> str | None:
    return next((word for word, names in WORDS.items() if name in names), None)


def _sizes(fields: dict[str, Any], words: dict[str, Any]) -> dict[str, Any]:
    """A value for every generic word, consistent for the given fields."""

    def default(word: str) -> Any:
        return next((fields[n] for n in WORDS[word] if isinstance(fields.get(n), int)), None)

    sizes = {**SIZES, **words}
    heads, kv_heads = sizes["heads"], default("kv_heads")
    fewer = isinstance(kv_heads, int) and kv_heads < (default("heads") or 0)
    sizes.setdefault("kv_heads", max(1, heads // 2) if fewer else heads)
    own_head_dim = "head_dim" in fields or "d_head" in fields or "dim_head" in fields
    if "head_dim" not in words:
        sizes["head_dim"] = 16 if heads <= 4 else 8
        for name in ("qk_rope_head_dim", "qk_head_dim"):  # latent attention: head_dim only repeats one of these
            if fields.get(name) and fields.get(name) == fields.get("head_dim"):
                sizes["head_dim"] = 8 if name == "qk_rope_head_dim" else 24
    sizes.setdefault("hidden", 48 if own_head_dim and sizes["head_dim"] * heads != 48 else heads * sizes["head_dim"])
    if not own_head_dim:
        if sizes["hidden"] % heads:
            raise InputError(f"hidden={sizes['hidden']} must be a multiple of heads={heads}, this type has no head_dim")
        sizes["head_dim"] = sizes["hidden"] // heads
    if heads % sizes["kv_heads"]:
        raise InputError(f"heads={heads} must be a multiple of kv_heads={sizes['kv_heads']}")
    top_k = default("top_k")
    if "top_k" not in words and isinstance(top_k, int):
        sizes["top_k"] = min(top_k, sizes["top_k"])
    return sizes


def _scaled(config: Any, words: dict[str, Any]) -> dict[str, Any]:
    """The constructor arguments that turn a configuration into its small one, those inside it included."""
    fields = {name: value for name, value in config.to_dict().items() if not isinstance(value, dict)}
    sizes = _sizes(fields, words)
    tables = _per_layer(fields)
    chosen = _choose_layers(tables, sizes["layers"], "layers" in words)
    if chosen:
        sizes["layers"] = len(chosen)
    changes: dict[str, Any] = {name: [column[i] for i in chosen] for name, column in tables.items()}
    changes.update({name: [i for i, here in enumerate(changes[name]) if here] for name in NUMBERED if name in tables})
    ids = iter(range(sizes["vocabulary"] - 1, 0, -1))
    for name, value in fields.items():
        word = _word_of(name)
        if word == "tied":
            changes.update({name: words["tied"]} if "tied" in words else {})
        elif isinstance(value, bool):
            changes.update({name: True} if name == "is_decoder" else {})
        elif _is_token_id(name):
            changes.update({name: _small_id(name, value, ids)} if value is not None else {})
        elif ("drop" in name or "jitter" in name) and isinstance(value, (int, float)):
            changes[name] = type(value)(0)
        elif word == "window":
            changes.update({name: sizes["window"]} if isinstance(value, int) else {})
        elif word and isinstance(value, (list, tuple)) and name in tables:
            changes[name] = [sizes[word]] * len(chosen)
        elif word and (value is None or isinstance(value, int)):
            changes[name] = sizes[word]
        elif name in SMALL and isinstance(value, int):
            changes[name] = min(value, SMALL[name])
    special = SPECIAL.get(type(config).__name__, {})
    changes.update({name: value(sizes) if callable(value) else value for name, value in special.items()})
    for name, inner in _sub_configs(config).items():
        arguments = {**_essential(inner.to_diff_dict()), **_scaled(inner, words)}
        changes[name] = _attempt(config.model_type, type(inner), **arguments)
    return changes


def _per_layer(fields: dict[str, Any]) -> dict[str, list]:
    """The lists with one value per layer: together a table with a row for each layer."""
    count = next((fields[name] for name in WORDS["layers"] if isinstance(fields.get(name), int)), 0)
    lists = {name: list(v) for name, v in fields.items() if isinstance(v, (list, tuple)) and name not in NUMBERED}
    tables = {name: v for name, v in lists.items() if len(v) == count > 2 and not isinstance(v[0], (list, dict))}
    numbered = {name: fields[name] for name in NUMBERED if isinstance(fields.get(name), (list, tuple))}
    return {**tables, **{name: [i in numbers for i in range(count)] for name, numbers in numbered.items()}}


def _choose_layers(tables: dict[str, list], wanted: int, strict: bool) -> list[int]:
    """Indices of the layers to keep: as few as show every kind, then the first ones up to `wanted`.

    `strict` keeps `wanted` even where it is too few to show each kind.
    """
    if not tables:
        return []
    count = len(next(iter(tables.values())))
    missing = {(name, value) for name, column in tables.items() for value in column}
    chosen: list[int] = []
    while missing:
        shown = [{(name, column[i]) for name, column in tables.items()} & missing for i in range(count)]
        best = max(range(count), key=lambda i: len(shown[i]))
        chosen.append(best)
        missing -= shown[best]
    if strict:
        chosen = chosen[:wanted]
    chosen += [i for i in range(count) if i not in chosen][: max(0, wanted - len(chosen))]
    chosen.sort()
    return chosen + [chosen[i % len(chosen)] for i in range(wanted - len(chosen))]


def _is_token_id(name: str) -> bool:
    return name.endswith(("token_id", "token_index", "_token_ids", "mask_index", "unk_index", "pad_index"))


def _small_id(name: str, value: Any, rest: Iterable[int]) -> Any:
    """A token id inside the small vocabulary: 0, 1, 2 for pad, bos, eos, the last ids for all others."""
    known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    small = known[name] if name in known else next(iter(rest))
    return [small] if isinstance(value, (list, tuple)) else small


def _special_ids(fields: dict[str, Any]) -> set[int]:
    """Every id that the configuration names, so that random text contains no image, padding or end."""
    found: set[int] = set()
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= _special_ids(value)
        elif isinstance(name, str) and _is_token_id(name):
            found |= {i for i in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(i, int)}
    return found


def _build(config: Any) -> torch.nn.Module:
    """The model in fp32 with the type's own initialisation."""
    import transformers
    from transformers import AutoModelForCausalLM

    def make(attention: str):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention, experts_implementation="eager"
        )

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return make("sdpa")
    except (ValueError, ImportError):  # the class says that it has no such attention
        return _attempt(config.model_type, make, "eager")
    except Exception as error:
        return _attempt(config.model_type, _raise, error)
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
