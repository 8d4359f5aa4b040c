"""The table of proven rules: (type of model, transformers minor, plan shape) to a verdict.

Rules that were inferred run only where `lindos.prove` has shown that they give the numbers of one process: in the
table that ships (`proven.json`, written by `lindos prove --all`), or in this machine's own (written by every `prove`
that ends equal). What is compared is not a name alone: every folded rule of the model at hand must be among those
proven, so a configuration that turns on another kind of block is not covered by its type's name.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from lindos.core.errors import RefusedError
from lindos.core.rules import Rules
from lindos.hf import models

SHIPPED = Path(__file__).with_name("proven.json")
CACHE = Path.home() / ".cache" / "lindos" / "proven.json"


def minor(version: str) -> str:
    """`minor("5.24.0") == "5.24"`."""
    return ".".join(version.split(".")[:2])


def name_of(model: nn.Module) -> str:
    """What the table calls a model: its type in transformers, else its class."""
    return getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__


def lines_of(model: nn.Module, rules: Rules) -> frozenset[str]:
    """A short hash of each rule and home with numbers folded, so that depth and sizes do not matter.

    Names start behind the prefix of the base model, so that all classes of a type are one.
    """
    prefix = getattr(model, "base_model_prefix", "") + "."
    texts = set()
    for rule in rules.rules:
        heads = rule.heads if isinstance(rule.heads, str) or rule.heads is None else "|".join(dict.fromkeys(rule.heads))
        blocks = min(rule.count, 4) if rule.role != "head_parameter" else 1
        pattern, home = (_folded(name.removeprefix(prefix)) for name in (rule.pattern, rule.home))
        texts.add(f"{pattern} {rule.role} {heads} {blocks} {rule.dim} {home}")
    for name, home in rules.homes.items():
        name = _folded(name.removeprefix(prefix))
        texts.add(f"{name} {sorted(home.local)} {sorted(home.arguments)} {home.query == home.key_value}")
    return frozenset(hashlib.blake2b(text.encode(), digest_size=4).hexdigest() for text in texts)


def _folded(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name)


def shape_of(axes: dict[str, int], heads: Iterable[Any]) -> str:
    """A plan's shape: the axes larger than one that change a model's modules, and how tp meets the heads.

    `tp`, `tp uneven` (heads do not divide), `tp shared` (fewer kv heads than ranks), ... Data parallelism and ZeRO act
    on parameters behind the modules, whatever the model is, so they are no part of it.
    """
    found = [axis for axis in ("pp", "sp", "tp") if axes.get(axis, 1) > 1]
    heads = list(heads)
    if any(its.sharing > 1 for its in heads):
        found.append("shared")
    if any(len(set(its.counts(kind))) > 1 for its in heads for kind in ("query", "key_value")):
        found.append("uneven")
    return " ".join(found)


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
    """Whether the rules of a type were shown to be equal for a plan shape with this transformers minor."""
    version = minor(version or models.version())
    for path in (CACHE, SHIPPED):
        entry = read(path).get(version, {}).get(name)
        if entry and entry.get("shapes", {}).get(shape) == "equal" and lines <= set(entry.get("lines", ())):
            return True
    return False


def check(model: nn.Module, rules: Rules, shape: str, tp: int) -> None:
    """Refuse inferred rules that nobody has proven.

    Raises:
        RefusedError: says how to prove them here.
    """
    name = name_of(model)
    if not shape or is_proven(name, lines_of(model, rules), shape):
        return
    sizes = ",".join(f"{word}={size}" for word, size in twin_sizes(shape, tp)[0].items())
    how = f"lindos prove --type {name} --tp {tp}{f' --twin {sizes}' * bool(sizes)}"
    raise RefusedError(
        f"the rules of {name} ({type(model).__name__}) were inferred and are not proven for the plan shape {shape!r} "
        f"with transformers {minor(models.version())}. Prove them here, in seconds ({how}, or --model DIR in place "
        "of the type): the result is remembered. Or write rules (docs/rules.md), or accept them with unproven=True."
    )


def remember(name: str, lines: Iterable[str], shape: str, path: Path | None = None) -> None:
    """Add a verdict "equal" to a table; lines that another configuration has proven stay."""
    path = path or CACHE
    table = json.loads(json.dumps(read(path)))
    entry = table.setdefault(minor(models.version()), {}).setdefault(name, {})
    entry["lines"] = sorted({*entry.get("lines", ()), *lines})
    entry.setdefault("shapes", {})[shape] = "equal"
    write(path, table)


def write(path: Path, table: dict[str, Any]) -> None:
    """Replace a table by one rename; a folder that cannot be written leaves no memory and no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(json.dumps(table, indent=1, sort_keys=True) + "\n")
        os.replace(file.name, path)
    except OSError:
        pass
