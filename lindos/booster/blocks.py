"""The blocks of a model: its repeated layers, found by structure and never by name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lindos.core.errors import RefusedError


@dataclass(frozen=True)
class Block:
    """One repeated layer. Name and module; a module that stands in its list twice is one block."""

    name: str
    module: nn.Module


def blocks_of(model: nn.Module, what: str) -> list[Block]:
    """Blocks of every outermost list of repeated layers: of a decoder, and of an encoder beside it.

    A list counts if it is no child of another list and its members are modules with parameters in modules below them:
    a list of embeddings or heads is none.

    Args:
        what: the option that asks, for messages.

    Raises:
        RefusedError: no such list; lists of one length side by side, whose members together are one layer.
    """
    found: dict[str, nn.ModuleList | nn.Sequential] = {}
    _search(model, "", found)
    if not found:
        raise RefusedError(
            f"{what} needs blocks: a ModuleList of layers that have modules with parameters inside. "
            f"{type(model).__name__} has none. Leave {what.partition('=')[0]} at its default."
        )
    homes: dict[tuple[str, int], str] = {}
    for name, members in found.items():
        home = (name.rpartition(".")[0], len(members))
        other = homes.setdefault(home, name)
        if other != name and len(members) > 1:
            raise RefusedError(
                f"{what} needs one list of blocks; {other!r} and {name!r} of {type(model).__name__} stand side by "
                f"side with {len(members)} members each, so a layer is spread over lists and no block can be told."
            )
    blocks: dict[int, Block] = {}
    for name, members in found.items():
        for i, module in enumerate(members):
            blocks.setdefault(id(module), Block(f"{name}.{i}", module))
    return list(blocks.values())


def _search(module: nn.Module, prefix: str, found: dict[str, nn.ModuleList | nn.Sequential]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.ModuleList | nn.Sequential) and _repeated(child):
            found[path] = child
        else:
            _search(child, path, found)


def _repeated(members: nn.ModuleList | nn.Sequential) -> bool:
    """Whether these are layers, with modules with parameters below each; a Sequential has many, of one class."""
    if not len(members) or not all(_deep(member) for member in members):
        return False
    return isinstance(members, nn.ModuleList) or (len(members) > 1 and len({type(m) for m in members}) == 1)


def _deep(module: nn.Module) -> bool:
    return any(any(True for _ in child.parameters()) for child in module.children())
