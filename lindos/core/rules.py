"""Rules: module name patterns to roles. Read from a model's own plan, inferred, or written in ten lines.

    [tensor]
    "transformer.wte" = "vocabulary_embedding"
    "transformer.h.*.attn.c_attn" = { role = "column", blocks = 3, heads = "query" }
    "transformer.h.*.mlp.c_proj" = "row"

`*` stands for one part of a dotted name. A rule is about a module, or one parameter that a module holds by itself.
Every name that a rule should match must match exactly one, and every rule must match something: a rule that silently
does nothing is how a model ends up nearly parallel.
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
    "latent": "whole weight, whole output that cut math reads: the output's gradient is summed",
    "inner_column": "column whose input is a latent, so that its gradient is summed there already",
    "whole_output": "row whose summed output is read by cut math again: summed forward and backward",
    "vocabulary_embedding": "embedding cut along the vocabulary, looked up where the id lives and summed",
    "vocabulary_head": "column whose outputs are the vocabulary",
    "head_norm": "norm, or any module, applied alike to each head of a cut tensor: whole, its gradient summed",
    "wide_norm": "norm over all heads or inner features: weight cut with them, statistics summed",
    "group_norm": "norm over each kv group of a cut tensor: weight cut, statistics summed where a group is shared",
    "convolution": "depthwise convolution of cut features: cut with them",
    "head_table": "embedding whose outputs are one number a head: cut with the heads",
    "head_parameter": "bare parameter with one line a head or feature: cut with them along `dim`",
    "activation_parameter": "bare parameter, or module, that cut features read alike: whole, its gradient summed",
    "experts": "fused experts, each cut along its inner size; output summed",
    "whole": "held whole by every rank; sees whole inputs",
}
KINDS = ("query", "key_value")
# What a role takes besides; the others take blocks, heads and home.
KEYS: dict[str, tuple[str, ...]] = {
    "head_parameter": ("blocks", "heads", "home", "dim"),
    **dict.fromkeys(
        ("whole", "latent", "head_norm", "activation_parameter", "experts", "vocabulary_embedding", "vocabulary_head"),
        (),
    ),
}


@dataclass(frozen=True)
class Rule:
    """One pattern and the role of the modules, or bare parameters, that it matches.

    Attributes:
        pattern: dotted name in which `*` stands for one part.
        role: a key of `ROLES`.
        blocks: number of equal fused blocks along the cut dim, or their sizes.
        heads: what the cut features are: "query" or "key_value" heads, one for each block where they differ, else None.
        home: the module whose heads they are; empty for the one that holds the match.
        dim: dim that a bare parameter is cut along.
        source: where the rule comes from, for messages.
    """

    pattern: str
    role: str
    blocks: int | tuple[int, ...] = 1
    heads: str | tuple[str, ...] | None = None
    home: str = ""
    dim: int = 0
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
        if any(kind not in (None, *KINDS) for kind in self.kinds(1)[:1] + self.kinds(self.count)):
            raise RulesError(f"rule {self.pattern!r}: heads is 'query' or 'key_value'; got {self.heads!r}.")
        if isinstance(self.heads, tuple) and len(self.heads) != self.count:
            raise RulesError(
                f"rule {self.pattern!r}: heads names a kind for each of {self.count} blocks; got {self.heads!r}."
            )

    @property
    def count(self) -> int:
        """Number of fused blocks."""
        return len(self.blocks) if isinstance(self.blocks, tuple) else self.blocks

    def kinds(self, count: int) -> tuple[str | None, ...]:
        """What the features of each of `count` blocks are."""
        return self.heads if isinstance(self.heads, tuple) else (self.heads,) * count

    def matches(self, name: str) -> bool:
        if "*" not in self.pattern:
            return name == self.pattern
        return re.fullmatch(re.escape(self.pattern).replace(r"\*", r"[^.]+"), name) is not None


@dataclass(frozen=True)
class Home:
    """A module that owns heads (attention), channels (state space) or groups, and what its own forward reads of them.

    Attributes:
        query, key_value: heads in all. Channels are heads of one element.
        local: attributes that become this rank's, with what they count: "query", "key_value" (their values scale with
            the heads), "ratio" (query heads to a kv head), or "=child" (the local channels of a convolution).
        arguments: inputs of its forward that come with all heads: (name, dim, kind); dim -1 counts from the end.
    """

    query: int
    key_value: int
    local: tuple[tuple[str, str], ...] = ()
    arguments: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True)
class Rules:
    """An ordered set of rules; where two match one module it is an error, so order only shows in print.

    Attributes:
        rules: the rules.
        homes: modules that own heads, by name, where more is known than their attributes say.
        left: modules that stay whole although they could be large, by name, with the reason.
    """

    rules: tuple[Rule, ...] = ()
    homes: Mapping[str, Home] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)

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
        """The rule of each module, or bare parameter, that has one.

        Raises:
            RulesError: a rule matches nothing, or two rules match one module.
        """
        found: dict[str, Rule] = {}
        used = set()
        names = list(dict.fromkeys(names))
        known = set(names)
        for rule in self.rules:
            for name in names if "*" in rule.pattern else [rule.pattern] * (rule.pattern in known):
                if not rule.matches(name):
                    continue
                used.add(rule)
                if name in found:
                    raise RulesError(
                        f"{name!r} is matched twice, by {found[name].pattern!r} and {rule.pattern!r}. Keep one."
                    )
                found[name] = rule
        for rule in self.rules:
            if rule not in used:
                close = nearest(rule.pattern, set(names))[:300]
                raise RulesError(f"rule {rule.pattern!r} matches no module or parameter: {close}.")
        return found


def _rule(pattern: str, value: Any) -> Rule:
    if isinstance(value, str):
        return Rule(pattern, value)
    known = ("role", "blocks", "heads", "home", "dim")
    if not isinstance(value, Mapping) or "role" not in value or set(value) - set(known):
        raise RulesError(f"rule {pattern!r} is a role or a table of {', '.join(known)}; got {value!r}.")
    blocks, heads = value.get("blocks", 1), value.get("heads")
    blocks = tuple(blocks) if isinstance(blocks, list) else blocks
    heads = tuple(heads) if isinstance(heads, list) else heads
    home, dim = value.get("home", ""), value.get("dim", 0)
    role = value["role"]
    takes = KEYS.get(role, ("blocks", "heads", "home")) if isinstance(role, str) else known
    ignored = [key for key in value if key != "role" and key not in takes]
    if ignored and role in ROLES:
        what = f"takes {', '.join(takes)}" if takes else "takes nothing else"
        raise RulesError(f"rule {pattern!r}: the role {role} {what}; got {', '.join(ignored)} too. Leave them out.")
    if not isinstance(home, str) or not isinstance(dim, int) or isinstance(dim, bool):
        raise RulesError(f"rule {pattern!r}: home is the name of a module and dim a number; got {home!r} and {dim!r}.")
    return Rule(pattern, value["role"], blocks, heads, home, dim)


def _toml(path: Path) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RulesError(f"{path} is no TOML: {error}.") from None
