"""Tape: the operations of one block as it runs, so that what backward needs can be computed again from what is kept.

The unit is a storage, not a tensor: a view is a geometry on a storage, so views are never computed again. A storage is
a root (it was there before: the block's input, a mask, a parameter), or one operation made it; operations in place are
later writes to it. To compute a storage again is to run its maker and its writes, in the order of the block, after
those of everything that they read. What cannot be run again (numbers drawn at random, an input that the block itself
overwrites) is kept, as it would be without a tape: what the tape does not understand costs memory, never a number.

The block's Python code does not run again, so neither do its hooks, its counters, its caches, nor its random masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

COLLECTIVE, LINEAR, ATTENTION, RANDOM, OTHER = "collective", "linear", "attention", "random", "other"
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "linear", "_scaled_mm", "addbmm")
_FUSED = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")


class Ref(NamedTuple):
    """A tensor as a geometry on a storage, read when `time` operations had run."""

    storage: int
    time: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(slots=True)
class Store:
    """What is known of one storage.

    Attributes:
        weak: the storage, as long as something else holds it.
        count_bytes: its size.
        root: a tensor on it, if it was there before the block; held while the tape records.
        maker: the operation that made it; -1 for a root.
        writes: operations that wrote to it in place.
        kind: of its maker.
        fixed: a parameter, or computed from parameters alone.
        parameter: a parameter's.
        held: a tensor on it, if the tape holds it although it could be computed again.
        spans: of a parameter's storage, which many parameters share: the bytes that each write wrote.
    """

    weak: StorageWeakRef
    count_bytes: int
    root: torch.Tensor | None = None
    maker: int = -1
    writes: list[int] = field(default_factory=list)
    kind: str = OTHER
    fixed: bool = False
    parameter: bool = False
    held: torch.Tensor | None = None
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Operation:
    """One call: leaves are Refs where tensors stood; `makes` and `writes` are storages."""

    run: Callable[..., Any]
    leaves: list[Any]
    form: Any
    makes: list[tuple[int, int]]  # (position among the flat outputs, storage)
    writes: tuple[int, ...]
    kind: str

    def reads(self) -> Iterable[Ref]:
        return (leaf for leaf in self.leaves if type(leaf) is Ref)


class Tape(TorchDispatchMode):
    """Records what runs inside it.

    Args:
        parameters: `_cdata` of the storages of the model's parameters.
        holds: kinds of operations whose results are held while recording, so that they may be kept afterwards.

    Attributes:
        stores: every storage seen, by number.
        operations: in order.
        free: storages that cost nothing to keep.
    """

    def __init__(self, parameters: frozenset[int] | set[int], holds: frozenset[str]) -> None:
        super().__init__()
        self.parameters, self.holds = parameters, holds | {RANDOM}
        self.stores: list[Store] = []
        self.operations: list[Operation] = []
        self.free: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._paused:
            self._note(func, args, kwargs or {}, out, _kind(func, args, kwargs or {}), _written(func))
        return out

    def collective(self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """A collective as one operation; in place if it returns the memory that it was given."""
        with self.quiet():
            out = run(x)
            same = out.untyped_storage()._cdata == x.untyped_storage()._cdata
            self._note(run, (x,), {}, out, COLLECTIVE, ((0, "x"),) if same else ())
        return out

    def quiet(self) -> _Quiet:
        """Inside, operations of the library's own are not recorded."""
        return _Quiet(self)

    def ref(self, tensor: torch.Tensor) -> Ref:
        """The tensor as it is now."""
        return Ref(
            self._number(tensor),
            len(self.operations),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
        )

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is not None:
            return number
        parameter = storage._cdata in self.parameters
        number = self._numbers[storage._cdata] = len(self.stores)
        self.stores.append(
            Store(
                StorageWeakRef(storage),
                storage.nbytes(),
                tensor.detach(),
                parameter=parameter,
                fixed=parameter,
            )
        )
        return number

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, kind: str, written: tuple) -> None:
        leaves, form = tree_flatten((args, kwargs))
        leaves = [self.ref(leaf) if _plain(leaf) else leaf for leaf in leaves]
        reads = [self.stores[leaf.storage] for leaf in leaves if type(leaf) is Ref]
        fixed = bool(reads) and all(store.fixed for store in reads)
        if kind == LINEAR and not any(store.fixed for store in reads):
            kind = OTHER  # a product of two activations belongs to attention, not to a linear layer
        makes = []
        for position, tensor in enumerate([out] if isinstance(out, torch.Tensor) else tree_flatten(out)[0]):
            if not _plain(tensor) or tensor.untyped_storage()._cdata in self._numbers:
                continue
            storage = tensor.untyped_storage()
            if func is torch.ops.aten._to_copy.default and reads[0].held is not None:
                kind = self._narrowed(reads[0], storage.nbytes(), kind)
            number = self._numbers[storage._cdata] = len(self.stores)
            makes.append((position, number))
            store = Store(StorageWeakRef(storage), storage.nbytes(), maker=len(self.operations), kind=kind, fixed=fixed)
            if kind in self.holds and not fixed:
                store.held = tensor.detach()
            self.stores.append(store)
        writes = tuple(dict.fromkeys(self._writes(args, kwargs, written)))
        for number in writes:
            self.stores[number].writes.append(len(self.operations))
        if makes or writes:
            self.operations.append(Operation(func, leaves, form, makes, writes, kind))

    @staticmethod
    def _narrowed(source: Store, count_bytes: int, kind: str) -> str:
        """A held result that is only cast to something smaller: the smaller one is held in its place."""
        if source.kind not in (LINEAR, ATTENTION) or count_bytes >= source.count_bytes:
            return kind
        source.held = None
        return source.kind

    def _writes(self, args: tuple, kwargs: dict, written: tuple) -> Iterable[int]:
        for position, name in written:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    number = self._number(tensor)
                    if self.stores[number].parameter:
                        self.stores[number].spans[len(self.operations)] = _span(self.ref(tensor))
                    yield number

    # --- what can and must run again --------------------------------------------------------------------------------

    def final(self, ref: Ref) -> bool:
        """Whether nothing was written to its storage after it was read."""
        store = self.stores[ref.storage]
        if not store.writes or store.writes[-1] < ref.time:
            return True
        if not store.parameter:
            return False
        first, last = _span(ref)
        return not any(a < last and first < b for n, (a, b) in store.spans.items() if n >= ref.time)

    def possible(self) -> list[bool]:
        """Whether each operation can run again: nothing random, nothing that is gone, in what it reads."""
        able: list[bool] = []
        for operation in self.operations:
            able.append(operation.kind != RANDOM and all(self.readable(ref, able) for ref in operation.reads()))
        return able

    def readable(self, ref: Ref, able: list[bool]) -> bool:
        """Whether a tensor will be there, or can be computed again by operations that are able to."""
        store = self.stores[ref.storage]
        if store.maker < 0 or (store.held is not None and self.final(ref)):
            return self.final(ref)
        return able[store.maker] and all(able[n] for n in store.writes if n < ref.time)

    def needs(self, refs: Iterable[Ref], kept: set[int]) -> tuple[set[int], set[int]]:
        """Operations that must run to have these tensors, and the storages, kept or roots, that they start from."""
        operations: set[int] = set()
        start: set[int] = set()
        stack = list(refs)
        while stack:
            ref = stack.pop()
            store = self.stores[ref.storage]
            if store.maker < 0 or (ref.storage in kept and self.final(ref)):
                start.add(ref.storage)
                continue
            for number in (store.maker, *(n for n in store.writes if n < ref.time)):
                if number not in operations:
                    operations.add(number)
                    stack.extend(self.operations[number].reads())
        return operations, start


class _Quiet:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def __enter__(self) -> None:
        self.tape._paused += 1

    def __exit__(self, *_: Any) -> None:
        self.tape._paused -= 1


class Replay:
    """The operations to run again, in order, and what they start from.

    Attributes:
        wanted: storages that it computes for backward.
    """

    def __init__(self, tape: Tape, numbers: set[int], wanted: set[int], kept: set[int]) -> None:
        self.operations = [tape.operations[n] for n in sorted(numbers)]
        self.wanted = wanted
        self.roots = {number for number, store in enumerate(tape.stores) if store.maker < 0}
        self._final = {
            ref for op in self.operations for ref in op.reads() if ref.storage in kept and tape.final(ref)
        } | {ref for op in self.operations for ref in op.reads() if ref.storage in self.roots}
        last = {s: i for i, op in enumerate(self.operations) for s in (*(r.storage for r in op.reads()), *_made(op))}
        self._done: list[list[int]] = [[] for _ in self.operations]
        for storage, i in last.items():
            if storage not in wanted:
                self._done[i].append(storage)

    def run(self, kept: Callable[[int], torch.UntypedStorage]) -> dict[int, torch.UntypedStorage]:
        """Storages of `wanted`, computed from those that `kept` gives."""
        made: dict[int, torch.UntypedStorage] = {}
        for i, operation in enumerate(self.operations):
            leaves = [
                onto(kept(x.storage) if x in self._final else made[x.storage], x) if type(x) is Ref else x
                for x in operation.leaves
            ]
            args, kwargs = tree_unflatten(leaves, operation.form)
            out = operation.run(*args, **kwargs)
            outputs = [out] if isinstance(out, torch.Tensor) else tree_flatten(out)[0]
            for position, storage in operation.makes:
                made[storage] = outputs[position].untyped_storage()
            for storage in self._done[i]:
                made.pop(storage, None)
        return made


def onto(storage: torch.UntypedStorage, ref: Ref) -> torch.Tensor:
    """The tensor that a ref describes, on a storage."""
    return torch.empty(0, dtype=ref.dtype, device=storage.device).set_(storage, ref.offset, ref.size, ref.stride)


def _span(ref: Ref) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one after its last."""
    reach = sum((size - 1) * stride for size, stride in zip(ref.size, ref.stride)) + 1
    return ref.offset * ref.dtype.itemsize, (ref.offset + reach) * ref.dtype.itemsize


def _made(operation: Operation) -> Iterable[int]:
    return (storage for _, storage in operation.makes)


def _plain(leaf: Any) -> bool:
    """A tensor that is a geometry on a storage and no more."""
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not (leaf.is_conj() or leaf.is_neg())


def _kind(func: Any, args: tuple, kwargs: dict) -> str:
    name = func._schema.name.removeprefix("aten::")
    if name.startswith(_FUSED):
        return RANDOM if _drops(func, args, kwargs) else ATTENTION
    if torch.Tag.nondeterministic_seeded in func.tags:
        return RANDOM
    return LINEAR if name in _PRODUCTS else OTHER


def _drops(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a fused attention draws numbers."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(value)
    return True


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Arguments that an operation writes to: (position, name)."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
