"""The library's files as syntax trees, and what they import at any depth."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "lindos"


@dataclass(frozen=True)
class Source:
    """One file of the library, or of what uses it."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def module(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """(line, dotted name) of every import, inside functions and `if TYPE_CHECKING` too."""
        found: list[tuple[int, str]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(node.lineno, name) for name in self._named(node)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
                found += [(node.lineno, str(a.value)) for a in node.args[:1] if isinstance(a, ast.Constant)]
        return found

    def _named(self, node: ast.ImportFrom) -> Iterator[str]:
        base = node.module or ""
        if node.level:
            here = self.module.split(".") + ["_"] * (self.path.name == "__init__.py")
            base = ".".join([*here[: len(here) - node.level], *([base] if base else [])])
        for alias in node.names:
            yield f"{base}.{alias.name}"

    def at(self, line: int, what: str) -> str:
        return f"{self.name}:{line}: {what}"


@lru_cache
def library() -> list[Source]:
    return [Source(path) for path in sorted(LIBRARY.rglob("*.py"))]


def everything() -> list[Source]:
    """The library and all that stands beside it in the repository."""
    folders = [ROOT / name for name in ("tests", "recipes", "benchmarks", "docs", "scripts")]
    return library() + [Source(path) for folder in folders for path in sorted(folder.rglob("*.py"))]
