"""Weights of a transformers folder, read by name in memory: slices where a tensor is stored as it is used.

transformers 5 stores some tensors otherwise than it computes with them (experts one by one, for example). Its own
converters are run for one target at a time, so no more than one tensor is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from lindos.core.errors import DataError
from lindos.core.layout import Box
from lindos.hf.models import is_transformers, persistent_buffers


@dataclass
class Group:
    """What makes one or several tensors in memory: stored keys, and transformers' converter if there is one."""

    target: str
    keys: list[tuple[str, str]] = field(default_factory=list)
    converter: Any = None


class Folder:
    """The safetensors files of a model folder.

    Raises:
        DataError: no weights, a truncated file, a tensor missing, extra or of another shape (named).
    """

    def __init__(self, path: str | Path, model: nn.Module) -> None:
        self.path, self.model = Path(path), model
        self.whole = _Whole(model)
        self.files = _files(self.path)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.keys = self._index()
        self.groups = _groups(model, list(self.keys))
        self._find_all_names(model)
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def check(self, names: Iterable[str], shapes: dict[str, tuple[int, ...]]) -> None:
        """Every parameter is there once, in its shape, and nothing else is."""
        wanted = set(names) | set(persistent_buffers(self.model))
        missing = sorted(wanted - set(self.groups))
        if missing:
            raise DataError(f"{self.path} lacks tensor {missing[0]!r}" + _more(missing) + " that the model needs.")
        known = wanted | {name for name, _ in self.model.named_buffers()} | set(_tied(self.model))
        extra = sorted({key for name, g in self.groups.items() if name not in known for key, _ in g.keys})
        if extra:
            raise DataError(f"{self.path} holds tensor {extra[0]!r}" + _more(extra) + " that the model lacks.")
        for name in wanted & set(shapes):
            group = self.groups[name]
            if group.converter is None and self.shapes[group.keys[0][0]] != shapes[name]:
                raise DataError(
                    f"{self.path}: tensor {name!r} is {list(self.shapes[group.keys[0][0]])} on disk, "
                    f"{list(shapes[name])} in the model. Is config.json that of these weights?"
                )

    def read(self, name: str, boxes: Iterable[Box] | None = None) -> torch.Tensor | list[torch.Tensor]:
        """A whole tensor, or the parts of it that boxes name, in the order of the boxes."""
        group = self.groups[name]
        if group.converter is None and boxes is not None:
            return [self._slice(group.keys[0][0], box) for box in boxes]
        whole = self._tensor(group.keys[0][0]) if group.converter is None else self._converted(group)[name]
        if boxes is None:
            return whole
        return [whole[tuple(slice(a, b) for a, b in box.full)] for box in boxes]

    def dtype(self) -> str:
        """The dtype that most stored tensors have."""
        counts: dict[str, int] = {}
        for dtype in self.dtypes.values():
            counts[dtype] = counts.get(dtype, 0) + 1
        return max(counts, key=lambda d: counts[d])

    def _find_all_names(self, model: nn.Module) -> None:
        """One stored tensor may become several in memory (tried on meta); a tied one may be stored by another name."""
        for group in list(self.groups.values()):
            if group.converter is not None:
                made = _convert(group, lambda key: torch.empty(self.shapes[key], device="meta"), self.whole)
                self.groups.update(dict.fromkeys(made, group))
        stored = {
            id(parameter): self.groups[name]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name in self.groups
        }
        for name, parameter in model.named_parameters():
            if name not in self.groups and id(parameter) in stored:
                self.groups[name] = stored[id(parameter)]

    def _converted(self, group: Group) -> dict[str, torch.Tensor]:
        if self._last[0] != group.target:
            self._last = (group.target, _convert(group, self._tensor, self.whole))
        return self._last[1]

    def _index(self) -> dict[str, Path]:
        keys: dict[str, Path] = {}
        for file in self.files:
            try:
                with safe_open(file, "pt") as opened:
                    for key in opened.keys():  # noqa: SIM118
                        keys[key] = file
                        part = opened.get_slice(key)
                        self.shapes[key], self.dtypes[key] = tuple(part.get_shape()), part.get_dtype()
            except SafetensorError as error:
                raise DataError(f"{file} is truncated or no safetensors file ({error}).") from None
        return keys

    def _tensor(self, key: str) -> torch.Tensor:
        with safe_open(self.keys[key], "pt") as opened:
            return opened.get_tensor(key)

    def _slice(self, key: str, box: Box) -> torch.Tensor:
        with safe_open(self.keys[key], "pt") as opened:
            if not box.full:
                return opened.get_tensor(key)
            return opened.get_slice(key)[tuple(slice(a, b) for a, b in box.full)]


def _files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise DataError(f"{path} lacks the file {missing[0]} that its index names.")
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise DataError(f"{path} holds no .safetensors file. lindos reads no pickle: convert .bin files first.")
    return files


def _groups(model: nn.Module, keys: list[str]) -> dict[str, Group]:
    """For every tensor in memory, what makes it. Conversions are tried on meta to learn their names."""
    if not is_transformers(model):
        return {key: Group(key, [(key, key)]) for key in keys}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model) or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    found: dict[str, Group] = {}
    for key in sorted(keys, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if target not in state and key in state:
            target, pattern = key, None
        group = found.setdefault(target, Group(target))
        group.keys.append((key, pattern or key))
        if pattern is not None:
            group.converter = by_pattern[pattern]
    return found


class _Whole:
    """The model as it was before any plan: a converter may size its pieces by the parameters, which are cut by then."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        named = model.named_parameters(remove_duplicate=False)
        self._parameters = {name: torch.empty(p.shape, device="meta") for name, p in named}

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._parameters[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _convert(group: Group, read: Any, model: _Whole) -> dict[str, torch.Tensor]:
    converter = deepcopy(group.converter)
    for key, pattern in group.keys:
        converter.add_tensor(group.target, key, pattern, read(key))
    made = converter.convert(group.target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _tied(model: nn.Module) -> list[str]:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [name for name in names if name not in dict(model.named_parameters())]


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
