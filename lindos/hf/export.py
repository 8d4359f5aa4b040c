"""Export: the safetensors files that transformers loads.

One tensor is whole at a time, or those few that transformers stores as one; files are shared out over ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lindos.checkpoint.files import DTYPES, Writer, naming, write_text
from lindos.checkpoint.publish import publish
from lindos.comm.world import World
from lindos.core.errors import InputError, nearest
from lindos.hf.models import is_transformers, persistent_buffers

FILE_BYTES = 2 << 30
Read = Callable[[str], torch.Tensor]


@dataclass
class Stored:
    """Tensors in memory, mostly one, and the tensors on disk that come of them."""

    names: tuple[str, ...]
    made: dict[str, tuple[int, ...]]
    dtype: torch.dtype


def export(
    path: str | Path, model: nn.Module, shapes: dict[str, tuple[int, ...]], read: Read, world: World, options: Any
) -> None:
    """Write a model folder; complete or absent.

    Args:
        shapes: full shape of every tensor to be written, by name in memory; tied ones once.
        read: collective; gives a full tensor on every rank.
        options: (dtype or None, tokenizer or None).

    Raises:
        CheckpointError: the folder exists or cannot be written.
    """
    dtype, tokenizer = dtype_of(model, options[0]), options[1]
    kinds = {name: buffer.dtype for name, buffer in persistent_buffers(model).items() if not buffer.is_floating_point()}
    plan = [
        Stored(names, _names_on_disk(model, {name: shapes[name] for name in names}), kinds.get(names[0], dtype))
        for names in _stored_together(model, shapes)
    ]
    files = _files(plan)

    def write(folder: Path) -> None:
        failed: Exception | None = None
        for number, members in enumerate(files):
            file = folder / _file_name(number, len(files))
            tensors = ((stored, {name: read(name) for name in stored.names}) for stored in members)
            if number % world.size == world.rank and failed is None:
                try:
                    _write_file(file, tensors, members, model)
                except Exception as found:
                    failed = found
            for _ in tensors:  # a rank that does not write, or no longer can, still takes part in every read
                pass
        if failed is not None:
            raise failed

    def finish(folder: Path) -> None:
        if len(files) > 1:
            index = {
                key: _file_name(n, len(files)) for n, members in enumerate(files) for s in members for key in s.made
            }
            write_text(
                folder / "model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": index}, indent=1)
            )
        with naming(folder):
            _write_config(model, folder, dtype)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)

    publish(Path(path), world, write, finish)


def _write_file(
    file: Path,
    tensors: Iterator[tuple[Stored, dict[str, torch.Tensor]]],
    members: list[Stored],
    model: nn.Module,
) -> None:
    announced = {key: (shape, stored.dtype) for stored in members for key, shape in stored.made.items()}
    writer = Writer(file, announced, {"format": "pt"})
    for stored, full in tensors:
        made = _on_disk(model, full)
        for key in stored.made:
            writer.put(key, made[key].to(stored.dtype).contiguous())
    writer.close()


def dtype_of(model: nn.Module, dtype: Any) -> torch.dtype:
    """The dtype of an export: as asked, else the config's, else fp32.

    Raises:
        InputError: no floating dtype of that name.
    """
    if dtype is None:
        config = getattr(model, "config", None)
        dtype = getattr(config, "dtype", None) or torch.float32
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
    made = getattr(torch, short.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if made not in DTYPES or not made.is_floating_point:
        raise InputError(f"export dtype={dtype!r}: {nearest(str(dtype), short)}.")
    return made


def _files(plan: list[Stored]) -> list[list[Stored]]:
    files: list[list[Stored]] = [[]]
    size = 0
    for stored in plan:
        its = sum(torch.Size(shape).numel() for shape in stored.made.values()) * stored.dtype.itemsize
        if files[-1] and size + its > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(stored)
        size += its
    return files


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _stored_together(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, ...]]:
    """The tensors in memory by what they become: those of which transformers stores one tensor stand together."""
    groups: dict[str, list[str]] = {}  # by the first name
    of_key: dict[str, str] = {}
    for name, shape in shapes.items():
        keys = _names_on_disk(model, {name: shape})
        first = next((of_key[key] for key in keys if key in of_key), name)
        groups.setdefault(first, []).append(name)
        of_key.update(dict.fromkeys(keys, first))
    return [tuple(names) for names in groups.values()]


def _names_on_disk(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return {key: tuple(tensor.shape) for key, tensor in _on_disk(model, empty).items()}


def _on_disk(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as transformers stores them: under the name that it keeps of tied ones, its own converters reversed."""
    if not is_transformers(model):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, {_kept(model, name): tensor for name, tensor in tensors.items()})  # type: ignore[arg-type]


def _kept(model: nn.Module, name: str) -> str:
    """Of a tensor with several names, the one that transformers writes."""
    source = (getattr(model, "all_tied_weights_keys", None) or {}).get(name)
    parameters = dict(model.named_parameters(remove_duplicate=False)) if source else {}
    return source if source and parameters.get(source) is parameters.get(name) is not None else name


def _write_config(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    if not is_transformers(model):
        return
    config: Any = model.config
    before = (config.architectures, config.dtype)
    config.architectures, config.dtype = [type(model).__name__], dtype
    try:
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)  # type: ignore[union-attr,operator]
    finally:
        config.architectures, config.dtype = before
