"""The loader over dp: which rows a rank takes is a function of (seed, epoch), equal on ranks that differ in tp, sp, pp.

Row k of a step belongs to dp rank k // batch_size, so the rows of a step joined over dp are the rows that one process
with a dp times larger batch would take. The cursor counts rows of the epoch over all ranks: it means the same under
any dp.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler

from lindos.booster.batch import IGNORED
from lindos.comm.seeds import seed_of
from lindos.core.errors import InputError


class Order(Sampler[list[int]]):
    """Lists of row numbers for one dp rank; -1 - row marks a filler whose labels are to be ignored."""

    def __init__(self, count: int, batch_size: int, dp: tuple[int, int], seed: int, options: tuple[bool, bool]) -> None:
        self.count, self.batch_size, (self.coordinate, self.size), self.seed = count, batch_size, dp, seed
        self.shuffle, self.drop_last = options
        self.epoch = self.first = 0

    @property
    def joined(self) -> int:
        """Rows of one step over all dp ranks."""
        return self.batch_size * self.size

    def steps(self, first: int = 0) -> int:
        rest = self.count - first
        return rest // self.joined if self.drop_last else -(-rest // self.joined)

    def __len__(self) -> int:
        return self.steps(self.first)

    def __iter__(self) -> Iterator[list[int]]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "order", self.epoch))
            order = torch.randperm(self.count, generator=generator).tolist()
        else:
            order = list(range(self.count))
        for step in range(self.steps(self.first)):
            start = self.first + step * self.joined + self.coordinate * self.batch_size
            rows = order[start : min(start + self.batch_size, self.count)]
            yield rows + [-1 - order[0]] * (self.batch_size - len(rows))


class _Rows(torch.utils.data.Dataset):
    """The dataset with fillers: a filler is a row that knows it is one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[bool, Any]:
        return (True, self.dataset[-1 - index]) if index < 0 else (False, self.dataset[index])

    def __len__(self) -> int:
        return len(self.dataset)


class _Collate:
    """The user's collate function, then labels of -100 for fillers."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, rows: list[tuple[bool, Any]]) -> Any:
        batch = self.inner([row for _, row in rows])
        fillers = [i for i, (filler, _) in enumerate(rows) if filler]
        if fillers:
            labels = batch.get("labels") if isinstance(batch, MutableMapping) else None
            if not isinstance(labels, torch.Tensor):
                raise InputError(
                    "the last step is short of rows and is filled with rows whose labels are -100, but batches have no "
                    "'labels'. Use DataLoader(drop_last=True)."
                )
            labels = labels.clone()  # a collate function may give one tensor as input_ids and labels
            labels[fillers] = IGNORED
            batch["labels"] = labels
        return batch


class Loader:
    """A DataLoader over dp with a cursor. Iterating gives the rest of the current epoch, then the next one.

    Attributes:
        epoch: of the order.
        rows: rows of this epoch, over all ranks, whose batches have been given out.
    """

    def __init__(self, loader: DataLoader, coordinate: int, dp: int, seed: int) -> None:
        shuffle = isinstance(loader.sampler, RandomSampler)
        if not shuffle and not isinstance(loader.sampler, SequentialSampler):
            raise InputError(
                f"the loader has a sampler of its own, {type(loader.sampler).__name__}, whose order cannot be "
                f"made equal on all "
                "ranks. Use shuffle=True or False, or give an iterable that takes booster.mesh.coordinate('dp') "
                "into account."
            )
        if shuffle and (loader.sampler.replacement or loader.sampler._num_samples is not None):  # type: ignore[attr-defined]
            raise InputError("the loader's RandomSampler draws with replacement or num_samples. Use shuffle=True.")
        if loader.batch_size is None:
            raise InputError("the loader needs a batch_size: what one dp rank takes in one step.")
        count = len(loader.dataset)  # type: ignore[arg-type]
        if count == 0:
            raise InputError("the loader's dataset is empty.")
        self.order = Order(count, loader.batch_size, (coordinate, dp), seed, (shuffle, loader.drop_last))
        if self.order.steps() == 0:
            raise InputError(
                f"{count} rows make no step of {self.order.joined} rows with drop_last=True. Use smaller batches."
            )
        self.loader = DataLoader(
            _Rows(loader.dataset),
            batch_sampler=self.order,
            collate_fn=_Collate(loader.collate_fn),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=False,  # the order changes with the epoch, and workers are told it when they start
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
        )
        self.epoch = self.rows = 0

    @property
    def dataset(self) -> Any:
        return self.loader.dataset.dataset  # type: ignore[attr-defined]

    @property
    def batch_size(self) -> int:
        return self.order.batch_size

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on all ranks."""
        return self.order.steps()

    def __iter__(self) -> Iterator[Any]:
        if self.rows >= self.order.count or self.order.steps(self.rows) == 0:
            self.epoch, self.rows = self.epoch + 1, 0
        self.order.epoch, self.order.first = self.epoch, self.rows
        epoch = self.epoch
        for batch in self.loader:
            self.rows += self.order.joined
            yield batch
        if self.epoch == epoch:
            self.epoch, self.rows = epoch + 1, 0

    def cursor(self) -> dict[str, int]:
        """Where the order stands, the same on all ranks and under any dp."""
        return {"epoch": self.epoch, "rows": self.rows, "count": self.order.count}

    def move_to(self, cursor: dict[str, int]) -> None:
        """Go on from a cursor.

        Raises:
            InputError: the dataset has another number of rows.
        """
        if cursor["count"] != self.order.count:
            raise InputError(
                f"the checkpoint's loader had {cursor['count']} rows; this one has {self.order.count}. Resume "
                f"with the same data."
            )
        self.epoch, self.rows = cursor["epoch"], cursor["rows"]


def over_dp(loader: Any, coordinate: int, dp: int, seed: int) -> Any:
    """A DataLoader over a sized dataset, rebuilt over dp; anything else as it is."""
    if isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__") and loader.batch_sampler is not None:
        return Loader(loader, coordinate, dp, seed)
    return loader
