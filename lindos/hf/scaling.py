"""Configurations scaled down to their twins': only sizes shrink, the pattern of the type stays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lindos.core.errors import InputError, RefusedError, nearest
from lindos.hf.kinds import CLASSES, CLASSES_OF, kind_of_type
from lindos.hf.twin_sizes import DEFAULTS, LEAST_LAYERS, NUMBERED, OUTWARD, SIZES, SMALL, SPECIAL, TEXT, WORDS


def twin_config(model_type: Any, kind: str | None = None, **overrides: Any):
    """The default configuration of a type (or a given configuration), scaled down with its pattern kept.

    Args:
        model_type: A type such as "llama" or "vit", or a configuration to scale.
        kind: What the model is for, one of `KINDS`; default the type's natural kind.
        overrides: Generic words (`heads=8, kv_heads=2, vocabulary=131, tied=True, layers=4, hidden=64`; `WORDS` lists
            them all) or the configuration's own field names.

    Raises:
        InputError: A word that is unknown, or that this type has no field for; a type that is not of this kind.
        RefusedError: transformers cannot make this configuration.

    Example:
        >>> twin_config("gemma3_text").layer_types
        ['sliding_attention', 'full_attention']
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = {}
    if isinstance(model_type, str):
        kind = kind_of_type(model_type, kind)
        base = attempt(model_type, CONFIG_MAPPING[model_type], **DEFAULTS.get(model_type, {}))
    else:
        base, given = model_type, model_type.to_diff_dict()
        kind = kind_of_type(base.model_type, kind)
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
    changes = {**_scaled(base, words), **_of_kind(base, kind)}
    config = attempt(base.model_type, type(base), **{**_essential(given), **changes, **known})
    both = getattr(config, "is_encoder_decoder", False) and kind != "causal"
    if both and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # as the type's checkpoints say
    return config


def _of_kind(base: Any, kind: str) -> dict[str, Any]:
    """What a kind says about a configuration, whatever its type."""
    found: dict[str, Any] = {}
    if kind != "causal" and hasattr(base, "is_decoder"):
        found["is_decoder"] = base.is_decoder
    if kind in CLASSES_OF:
        found["num_labels"] = CLASSES
        if kind == "sequence":
            found["pad_token_id"] = 0  # decoders look for the last token before the padding
    return found


def attempt(model_type: str, make, *args: Any, **kwargs: Any):
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
    inner = [value for name, value in _sub_configs(config).items() if name in (*TEXT, "attn_config")]
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
    own_head_dim = any(name in fields for name in ("head_dim", "d_head", "dim_head", "d_kv"))
    if "head_dim" not in words:
        sizes["head_dim"] = 16 if heads <= 4 else 8
        for name in ("qk_rope_head_dim", "qk_head_dim"):  # latent attention: head_dim only repeats one of these
            if fields.get(name) and fields.get(name) == fields.get("head_dim"):
                sizes["head_dim"] = 8 if name == "qk_rope_head_dim" else 24
    taken = {heads * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]}
    sizes.setdefault("hidden", next(h for h in (48, 72, 80) if h not in taken) if own_head_dim else max(taken))
    if not own_head_dim:
        if sizes["hidden"] % heads:
            raise InputError(f"hidden={sizes['hidden']} must be a multiple of heads={heads}, this type has no head_dim")
        sizes["head_dim"] = sizes["hidden"] // heads
    if "kv_heads" in words and fields.get("kv_lora_rank") and sizes["kv_heads"] != heads:
        raise InputError(
            f"kv_heads={sizes['kv_heads']} must be heads={heads} in a type with latent attention. Leave it out"
        )
    if heads % sizes["kv_heads"]:
        raise InputError(f"heads={heads} must be a multiple of kv_heads={sizes['kv_heads']}")
    top_k = default("top_k")
    if "top_k" not in words and isinstance(top_k, int):
        sizes["top_k"] = min(top_k, sizes["top_k"])
    return sizes


def _scaled(config: Any, words: dict[str, Any], outer: int | None = None) -> dict[str, Any]:
    """The constructor arguments that turn a configuration into its small one, those inside it included.

    Args:
        outer: hidden size of the text model around, which some outputs of a configuration inside must have.
    """
    fields = _fields(config)
    sizes = _sizes(fields, words)
    kind = type(config).__name__
    if "layers" not in words:
        sizes["layers"] = max(sizes["layers"], LEAST_LAYERS.get(kind, 0))
    tables = _per_layer(fields)
    chosen = _choose_layers(tables, sizes["layers"], "layers" in words)
    if chosen:
        sizes["layers"] = len(chosen)
    changes: dict[str, Any] = {name: [column[i] for i in chosen] for name, column in tables.items()}
    changes.update({name: [i for i, here in enumerate(changes[name]) if here] for name in NUMBERED if name in tables})
    aliases = {real: generic for generic, real in config.attribute_map.items() if "head_dim" not in generic}
    ids = iter(range(sizes["vocabulary"] - 1, 0, -1))
    for name, value in fields.items():
        if name in OUTWARD:
            changes.update({name: outer} if outer else {})
        elif name not in tables or _word_of(name):
            word = _word_of(name) or _word_of(aliases.get(name, ""))
            changes.update(_small(name, value, word, sizes, words, ids, len(chosen) if name in tables else 0))
    special = SPECIAL.get(kind, {})
    changes.update({name: value(sizes) if callable(value) else value for name, value in special.items()})
    if getattr(config, "is_heterogeneous", False):
        changes["per_layer_config"] = _own_layers(config, chosen or list(range(sizes["layers"])), changes)
    inside = dict(sorted(_sub_configs(config).items(), key=lambda item: item[0] not in TEXT))
    for name, inner in inside.items():
        text = next((changes[n].hidden_size for n in TEXT if n in changes and name not in TEXT), outer)
        arguments = {**_essential(inner.to_diff_dict()), **_scaled(inner, words, text)}
        changes[name] = attempt(config.model_type, type(inner), **arguments)
    return changes


def _fields(config: Any) -> dict[str, Any]:
    """Fields of a configuration as they are in memory, which may differ from what it writes; without dicts."""
    found = config.to_dict()
    if not getattr(config, "is_heterogeneous", False):  # one that is raises where layers differ
        found = {name: getattr(config, name, value) for name, value in found.items()}
    inside = config.sub_configs
    return {name: value for name, value in found.items() if not isinstance(value, dict) and name not in inside}


def _small(
    name: str, value: Any, word: str | None, sizes: dict[str, Any], words: dict[str, Any], ids: Any, rows: int
) -> dict[str, Any]:
    """What one field becomes, or nothing where it stays. `rows`: of its list with a value per layer."""
    if word == "tied":
        return {name: words["tied"]} if "tied" in words else {}
    if isinstance(value, bool):
        return {name: True} if name == "is_decoder" else {}
    if _is_token_id(name):
        return {name: _small_id(name, value, ids)} if value is not None else {}
    if ("drop" in name or "jitter" in name) and isinstance(value, (int, float)):
        return {name: type(value)(0)}
    if word == "window":
        return {name: sizes["window"]} if isinstance(value, int) else {}
    if word and rows and isinstance(value, (list, tuple)):
        return {name: [sizes[word]] * rows}
    if word == "vocabulary" and value == 0:  # the type goes without
        return {}
    if word and (value is None or isinstance(value, int)):
        return {name: sizes[word]}
    return {name: min(value, SMALL[name])} if name in SMALL and isinstance(value, int) else {}


def _own_layers(config: Any, chosen: list[int], base: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Sizes that single layers have of their own, in the proportion to the common size that they had."""
    written = config.to_dict()
    given = {int(index): own for index, own in written["per_layer_config"].items()}
    least = base.get(next((name for name in WORDS["top_k"] if name in base), ""), 1)
    found: dict[int, dict[str, Any]] = {}
    for place, layer in enumerate(chosen):
        for name, value in given.get(layer, {}).items():
            common = written.get(name)
            if name in base and isinstance(value, int) and not isinstance(value, bool) and common:
                value = max(least if _word_of(name) == "experts" else 1, round(base[name] * value / common))
            found.setdefault(place, {})[name] = value
        heads, kv_heads = (next((n for n in WORDS[w] if n in found.get(place, {})), "") for w in ("heads", "kv_heads"))
        if heads and kv_heads and found[place][heads] % found[place][kv_heads]:
            found[place][kv_heads] = 1
    return found


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


def special_ids(fields: dict[str, Any]) -> set[int]:
    """Every id that the configuration names, so that random text contains no image, padding or end."""
    found: set[int] = set()
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= special_ids(value)
        elif isinstance(name, str) and _is_token_id(name):
            found |= {i for i in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(i, int)}
    return found
