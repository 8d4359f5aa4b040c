"""The table of proven rules: (type of model, transformers minor, plan shape) to a verdict.

Rules that were inferred run only where `lindos.prove` has shown that they give the numbers of one process: in the
table that ships (`proven.json`, written by `lindos prove --all`), or in this machine's own (written by every `prove`
that ends equal). What is compared is not a name alone: every folded rule of the model at hand must be among those
proven, so a configuration that turns on another kind of block is not covered by its type's name.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lindos.core.errors import DataError, RefusedError
from lindos.core.rules import Rules
from lindos.hf import models
from lindos.parallel.tensor.heads import Heads

SHIPPED = Path(__file__).with_name("proven.json")
CACHE = Path.home() / ".cache" / "lindos" / "proven.json"


def minor(version: str) -> str:
    """`minor("5.24.0") == "5.24"`."""
    return ".".join(version.split(".")[:2])


def name_of(model: nn.Module) -> str:
    """What the table calls a model: its type in transformers, else its class."""
    return getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__


FLAGS = re.compile(r"alibi|parallel|multi_query|new_decoder|qk_?(layer)?_?norm|position_embedding_type|attention_type")


def lines_of(model: nn.Module, rules: Rules, heads: Mapping[str, Heads]) -> frozenset[str]:
    """A short hash of each rule, home and flag, so that depth and sizes do not matter but all else does.

    A line of a rule names the class whose forward reads the module; one of a home says how tp meets its heads; one of a
    flag is a setting of the configuration that changes a forward without changing a module. Names start behind the
    prefix of the base model, so that all classes of a type are one.
    """
    prefix = getattr(model, "base_model_prefix", "") + "."
    modules = dict(model.named_modules())
    texts = set()
    for rule in rules.rules:
        kinds = rule.heads if isinstance(rule.heads, str) or rule.heads is None else "|".join(dict.fromkeys(rule.heads))
        blocks = min(rule.count, 4) if rule.role != "head_parameter" else 1
        pattern, home = (_folded(name.removeprefix(prefix)) for name in (rule.pattern, rule.home))
        reader = modules.get(rule.pattern.rpartition(".")[0])
        texts.add(f"{pattern} {rule.role} {kinds} {blocks} {rule.dim} {home} {_class(reader)}")
    for name, home in rules.homes.items():
        folded = _folded(name.removeprefix(prefix))
        texts.add(f"{folded} {heads[name].fit if name in heads else ''} {_class(modules.get(name))}")
        texts |= {f"{folded} local {pair}" for pair in home.local} | {f"{folded} given {arg}" for arg in home.arguments}
    config = getattr(model, "config", None)
    for name, value in vars(config).items() if config is not None else ():
        if FLAGS.search(name) and isinstance(value, bool | str) and _is_read(name, model):
            texts.add(f"flag {name}={value}")
    return frozenset(hashlib.blake2b(text.encode(), digest_size=4).hexdigest() for text in texts)


def _is_read(name: str, model: nn.Module) -> bool:
    """Whether a field can change this model: its class declares it, or its code names it. Old folders carry others."""
    if hasattr(type(model.config), name):
        return True
    module = sys.modules.get(type(model).__module__)
    try:
        return module is None or name in inspect.getsource(module)
    except (OSError, TypeError):  # no source to look into
        return True


def _class(module: nn.Module | None) -> str:
    if module is None or type(module).__module__.startswith("torch."):
        return ""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _folded(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name)


def shape_of(axes: dict[str, int], heads: Iterable[Heads]) -> str:
    """A plan's shape: the axes larger than one that change a model's modules, and how tp meets the heads.

    `tp`, `tp uneven` (heads do not divide), `tp shared` (fewer kv heads than ranks), ... Data parallelism and ZeRO act
    on parameters behind the modules, whatever the model is, so they are no part of it.
    """
    found = [axis for axis in ("pp", "sp", "tp") if axes.get(axis, 1) > 1]
    words = {word for its in heads for word in its.fit.split()}
    return " ".join(found + [word for word in ("shared", "uneven") if word in words])


def twin_sizes(shape: str, tp: int) -> list[dict[str, int]]:
    """Sizes of a twin that gives a plan this shape, the likeliest first; for types without kv heads the second."""
    if "uneven" in shape:
        return [{"heads": 2 * (tp + 1), "kv_heads": tp + 1}, {"heads": tp + 1}]
    if "shared" in shape:
        return [{"heads": 2 * tp, "kv_heads": max(1, tp // 2)}]
    return [{"heads": 2 * tp, "kv_heads": tp}, {"heads": 2 * tp}] if tp > 2 else [{}]


@functools.lru_cache(maxsize=4)
def _read(path: Path, stamp: int) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def read(path: Path) -> dict[str, Any]:
    """A table: {minor: {type: {"lines", "shapes": {shape: verdict}, "cut", "reason"}}}; empty where there is none."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return {}


def is_proven(name: str, lines: frozenset[str], shape: str, version: str | None = None) -> bool:
    """Whether every line of a type was shown to be equal with this transformers minor, and nothing to differ."""
    version = minor(version or models.version())
    entries = [read(path).get(version, {}).get(name, {}) for path in (CACHE, SHIPPED)]
    if any(sorted(lines) in entry.get("differs", {}).get(shape, ()) for entry in entries):
        return False
    return bool(lines) and lines <= {line for entry in entries for line in entry.get("lines", ())}


def check(model: nn.Module, rules: Rules, heads: Mapping[str, Heads], axes: dict[str, int]) -> None:
    """Refuse inferred rules that nobody has proven.

    Raises:
        RefusedError: says how to prove them here.
    """
    _refuse_foreign(model, rules)
    name, shape, tp = name_of(model), shape_of(axes, heads.values()), axes["tp"]
    if is_proven(name, lines_of(model, rules, heads), shape):
        return
    sizes = ",".join(f"{word}={size}" for word, size in twin_sizes(shape, tp)[0].items())
    kind = _kind_to_prove(model)
    how = f"lindos prove --type {name}{f' --kind {kind}' * bool(kind)} --tp {tp}{f' --twin {sizes}' * bool(sizes)}"
    raise RefusedError(
        f"the rules of {name} ({type(model).__name__}) were inferred and are not proven for the plan shape {shape!r} "
        f"with transformers {minor(models.version())}. Prove them here, in seconds ({how}, or --model DIR in place "
        "of the type): the result is remembered. Or write rules (docs/rules.md), or accept them with unproven=True."
    )


def _kind_to_prove(model: nn.Module) -> str:
    """The kind whose proof is of this class's blocks; empty for the type's own."""
    kind = models.kind_of(model)
    if kind == "classification":
        return next((k for k in ("sequence", "token", "image") if f"For{k.title()}C" in type(model).__name__), "")
    return kind if kind in ("masked", "conditional") else ""


def _refuse_foreign(model: nn.Module, rules: Rules) -> None:
    """A class from elsewhere in the place of one of transformers' may compute anything, by the same names and shapes.

    Raises:
        RefusedError: names the module and its class.
    """
    modules = dict(model.named_modules())
    for rule in rules.rules:
        cls = type(modules.get(rule.pattern))
        place = f"{cls.__module__}."
        if cls is type(None) or place.startswith("torch.nn."):
            continue
        if not place.startswith("transformers.") or place.startswith("transformers.integrations."):
            raise RefusedError(
                f"{rule.pattern} is a {cls.__module__}.{cls.__qualname__}: rules are inferred for the classes of torch "
                "and of transformers' models only, and proofs are of those. Write rules (docs/rules.md), or accept "
                "the inferred ones with unproven=True."
            )


def remember(name: str, lines: Iterable[str], shape: str, verdict: str = "equal", path: Path | None = None) -> None:
    """Add a verdict to a table; lines that another configuration has proven stay.

    What differs is kept as the whole set of lines until the same set is equal: each of them may be right elsewhere.
    """
    path = path or CACHE
    table = json.loads(json.dumps(read(path)))
    entry = table.setdefault(minor(models.version()), {}).setdefault(name, {})
    if verdict == "equal":
        entry["lines"] = sorted({*entry.get("lines", ()), *lines})
        entry.pop("reason", None)
    differs = entry.pop("differs", {})
    sets = [known for known in differs.get(shape, ()) if known != sorted(lines)]
    if verdict == "differs":
        sets.append(sorted(lines))
    differs = {**differs, shape: sets}
    if any(differs.values()):
        entry["differs"] = {key: value for key, value in differs.items() if value}
    entry.setdefault("shapes", {})[shape] = verdict
    write(path, table)


def write(path: Path, table: dict[str, Any]) -> None:
    """Replace a table by one rename. A memory that cannot be kept in the user's folder is no error; any other is.

    Raises:
        DataError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", "utf-8")
        os.replace(part, path)
    except OSError as error:
        if path != CACHE:
            raise DataError(f"the table {path} cannot be written: {error.strerror}.") from error
