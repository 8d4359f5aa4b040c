"""From the data section to rows on every rank: corpus built once, loaders for training, batches for validation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lindos import corpus
from lindos.core.errors import InputError
from lindos.corpus.index import INDEX_FILE
from lindos.train.config import Config, Data
from lindos.train.folder import CORPUS_FOLDER

STDLIB = "stdlib"
IGNORED_LABEL = -100


def shards_of(config: Config) -> Path:
    """Where the token shards of a run lie, once they are built."""
    return _ready(config.data) or Path(config.data.out or Path(config.run) / CORPUS_FOLDER)


def prepared(config: Config, world: Any, say: Callable[[str], None], stopped: Callable[[], bool]) -> Path | None:
    """The folder of token shards that the section `data` describes: built by the first rank while the others wait.

    Returns:
        The folder, or None where a stop was asked for before it was complete.

    Raises:
        DataError: text, tokenizer or shards that cannot be read; on all ranks.
        InputError: settings that contradict each other.
    """
    out = shards_of(config)
    if _ready(config.data) is not None:
        return out
    done = first_rank_does(world, lambda: _build(config.data, out, say), "build the corpus", stopped)
    return out if done else None


def first_rank_does(world: Any, work: Callable[[], None], name: str, stopped: Callable[[], bool]) -> bool:
    """Long work of the first rank; the others look in every second, so no limit of a collective applies to it.

    Returns:
        Whether it was completed; False where `stopped` came first, on any rank.

    Raises:
        BaseException: what the work raised; on all ranks.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    if world.rank == 0:
        thread.start()
    while True:
        if world.rank == 0:
            thread.join(timeout=1.0)
        busy = world.rank == 0 and thread.is_alive()
        states = world.exchange([busy, bool(stopped())], name)
        if not states[0][0]:
            break
        if any(asked for _, asked in states):
            return False
    world.agree(errors[0] if errors else None, name)
    return True


def _ready(data: Data) -> Path | None:
    """The corpus folder that data.path names, if it names one."""
    folders = [path for path in data.path if (Path(path) / INDEX_FILE).is_file()]
    if folders and len(data.path) > 1:
        raise InputError(f"data.path must be one corpus folder or only text, got {folders[0]} beside others.")
    return Path(folders[0]) if folders else None


def _build(data: Data, out: Path, say: Callable[[str], None]) -> None:
    paths: list[Any] = [path for path in data.path if path != STDLIB]
    if len(paths) < len(data.path):
        paths += corpus.standard_library()
    tokenizer = tokenizer_of(data, paths, out, say)
    say(f"encoding the text into {out}")
    corpus.build(paths, tokenizer, out, validation_fraction=data.validation_fraction, field=data.text_field)


def tokenizer_of(data: Data, paths: list[Any], out: Path, say: Callable[[str], None]) -> corpus.Tokenizer:
    """The tokenizer of the section: loaded from a folder or trained on the text."""
    name = str(data.tokenizer)
    if not name.isdigit():
        return corpus.load(name)
    say(f"training a tokenizer of {name} tokens")
    return corpus.train(corpus.documents(paths, field=data.text_field), int(name))


def loader_of(rows: corpus.TokenRows, batch_rows: int) -> DataLoader:
    """Batches of the training split; boosting rebuilds it over dp."""
    return DataLoader(rows, batch_size=batch_rows, shuffle=True)


def validation_batches(rows: corpus.TokenRows, batch_rows: int, dp: int, place: int) -> Iterator[dict[str, Any]]:
    """This rank's part of the validation split: every dp-th row, in whole batches.

    The last batch is filled with copies whose labels are all -100: they count nothing, and every batch can be cut into
    micro-batches.
    """
    mine = range(place, len(rows), dp)
    for start in range(0, len(mine), batch_rows):
        chosen = [rows[number] for number in mine[start : start + batch_rows]]
        filler = {"input_ids": chosen[0]["input_ids"], "labels": torch.full_like(chosen[0]["labels"], IGNORED_LABEL)}
        chosen += [filler] * (batch_rows - len(chosen))
        yield {key: torch.stack([row[key] for row in chosen]) for key in chosen[0]}
