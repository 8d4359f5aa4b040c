"""Rules: module name patterns to roles. Read from a model's own plan, inferred, or written in ten lines.

    [tensor]
    "transformer.wte" = "vocabulary_embedding"
    "transformer.h.*.attn.c_attn" = { role = "column", blocks = 3, heads = "query" }
    "transformer.h.*.mlp.c_proj" = "row"

`*` stands for one part of a dotted name. Every module that a rule should match must match exactly one, and every rule
must match something: a rule that silently does nothing is how a model ends up nearly parallel.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lindos.core.errors import RulesError, nearest

ROLES = {
    "column": "weight cut along its outputs; input whole, output cut",
    "row": "weight cut along its inputs; input cut, output summed; a bias is added once",
    "gathered_column": "column whose output is gathered again",
    "split_row": "row whose whole input is first split",
    "vocabulary_embedding": "embedding cut along the vocabulary, looked up where the id lives and summed",
    "vocabulary_head": "column whose outputs are the vocabulary",
    "head_norm": "norm applied to each head of a cut tensor: whole, its gradient summed",
    "experts": "fused experts, each cut along its inner size; output summed",
    "whole": "held whole by every rank; sees whole inputs",
}


@dataclass(frozen=True)
class Rule:
    """One pattern and the role of the modules that it matches.

    Attributes:
        pattern: dotted module name in which `*` stands for one part.
        role: a key of `ROLES`.
        blocks: number of equal fused blocks along the outputs, or their sizes.
        heads: "query" or "key_value" when outputs (column) or inputs (row) are attention heads, else None.
        source: where the rule comes from, for messages.
    """

    pattern: str
    role: str
    blocks: int | tuple[int, ...] = 1
    heads: str | None = None
    source: str = "written"

    def __post_init__(self) -> None:
        if not isinstance(self.role, str) or self.role not in ROLES:
            close = nearest(str(self.role), ROLES)
            raise RulesError(f"rule {self.pattern!r} names no known role {self.role!r}: {close}.")
        sizes = self.blocks if isinstance(self.blocks, tuple) else (self.blocks,)
        if not sizes or not all(type(size) is int and size > 0 for size in sizes):
            raise RulesError(
                f"rule {self.pattern!r}: blocks is a number of blocks or their sizes, from 1; got {self.blocks!r}."
            )
        if self.heads not in (None, "query", "key_value"):
            raise RulesError(f"rule {self.pattern!r}: heads is 'query' or 'key_value'; got {self.heads!r}.")

    def matches(self, name: str) -> bool:
        return re.fullmatch(re.escape(self.pattern).replace(r"\*", r"[^.]+"), name) is not None


@dataclass(frozen=True)
class Rules:
    """An ordered set of rules; where two match one module it is an error, so order only shows in print."""

    rules: tuple[Rule, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(source: Rules | Mapping[str, Any] | str | Path) -> Rules:
        """Rules from TOML text in a file, from a mapping of the same shape, or as they are.

        Raises:
            RulesError: no such file, no table `[tensor]`, an unknown role or key.
        """
        if isinstance(source, Rules):
            return source
        if isinstance(source, str | Path):
            path = Path(source)
            if not path.is_file():
                raise RulesError(f"rules are read from a TOML file; there is none at {str(path)!r}.")
            source = _toml(path)
        table = source.get("tensor")
        if not isinstance(table, Mapping) or set(source) - {"tensor"}:
            raise RulesError(f"rules have one table, [tensor]; got {sorted(source)}.")
        return Rules(tuple(_rule(pattern, value) for pattern, value in table.items()))

    def resolve(self, names: Iterable[str]) -> dict[str, Rule]:
        """The rule of each module that has one.

        Raises:
            RulesError: a rule matches nothing, or two rules match one module.
        """
        found: dict[str, Rule] = {}
        used = set()
        names = list(names)
        for rule in self.rules:
            for name in names:
                if not rule.matches(name):
                    continue
                used.add(rule)
                if name in found:
                    raise RulesError(
                        f"module {name!r} is matched twice, by {found[name].pattern!r} and {rule.pattern!r}. Keep one."
                    )
                found[name] = rule
        for rule in self.rules:
            if rule not in used:
                raise RulesError(f"rule {rule.pattern!r} matches no module: {nearest(rule.pattern, set(names))[:300]}.")
        return found


def _rule(pattern: str, value: Any) -> Rule:
    if isinstance(value, str):
        return Rule(pattern, value)
    if not isinstance(value, Mapping) or "role" not in value or set(value) - {"role", "blocks", "heads"}:
        raise RulesError(f"rule {pattern!r} is a role or a table of role, blocks and heads; got {value!r}.")
    blocks = value.get("blocks", 1)
    return Rule(pattern, value["role"], tuple(blocks) if isinstance(blocks, list) else blocks, value.get("heads"))


def _toml(path: Path) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RulesError(f"{path} is no TOML: {error}.") from None
