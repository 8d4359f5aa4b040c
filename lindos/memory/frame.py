"""Frame: what one call of a block leaves for its backward, where that rests, and how it comes back."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lindos.comm.opaque import watched
from lindos.core.errors import NumbersError
from lindos.memory import tape as tapes
from lindos.memory.homes import Away, Homes
from lindos.memory.keep import Choice, Policy, choose, everything
from lindos.memory.saved import counters
from lindos.memory.tape import COLLECTIVE, Ref, Replay, Tape


class Frame:
    """Enter it around one forward of a block.

    Args:
        name: of the block, for messages.
        parameters: storages of the model's parameters: they are neither kept, nor moved, nor counted.
        policy: what to compute again; None for nothing.
        homes: where what is kept goes, or None to leave it on the device.
        before: the frame of the block that ran before this one; its backward comes next.
        seen: storages that earlier blocks of this forward keep, by `_cdata`; this one adds its own.

    Attributes:
        choice: what was kept; there once the forward has ended.
        all_bytes: what would have been kept without recompute.
        collective_bytes: results of collectives that backward leads through.
    """

    def __init__(
        self,
        name: str,
        parameters: set[int],
        policy: Policy | None,
        homes: Homes | None,
        before: Frame | None,
        seen: dict[int, StorageWeakRef],
    ) -> None:
        self.name, self.policy, self.homes, self.seen = name, policy, homes, seen
        self.tape: Tape | None = Tape(parameters, policy.holds if policy else frozenset())
        self.choice: Choice | None = None
        self.all_bytes = self.collective_bytes = 0
        self._before = weakref.ref(before) if before is not None else None
        self._saved: list[Ref] = []
        self._counts: list[int] = []  # of writes in place, as torch counts them, when each was saved
        self._tensors: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._away: dict[int, Away] = {}
        self._replay: Replay | None = None
        self._left: dict[int, int] = {}
        self._again: dict[int, torch.UntypedStorage] = {}
        self._uses: dict[int, int] = {}
        self._stale: set[int] = set()
        self._begun = False

    # --- forward ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Frame:
        assert self.tape is not None
        self._stack = ExitStack()
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
        if self.policy is not None:
            self._stack.enter_context(watched(self.tape))
            self._stack.enter_context(self.tape)
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._stack.close()
        if kind is None:
            self._close()

    def _pack(self, tensor: torch.Tensor) -> Any:
        tape = self.tape
        assert tape is not None
        with tape.quiet():
            if tensor.layout is not torch.strided or tensor.untyped_storage()._cdata in tape.parameters:
                return tensor.detach()
            if tensor.is_conj() or tensor.is_neg():
                return tensor.detach()
            ref = tape.ref(tensor)
            self._tensors[ref.storage] = tensor.detach()
            self._counts.append(tensor._version)
            self._saved.append(ref)
            return _Ticket(self, len(self._saved) - 1)

    def _close(self) -> None:
        """The forward has ended: keep what was chosen, let go of the rest."""
        tape, saved = self.tape, self._saved
        assert tape is not None
        self.tape = None
        tape.free = {n for n, store in enumerate(tape.stores) if store.parameter or store.weak.cdata in self.seen}
        full = everything(tape, saved)
        self.choice = choice = choose(tape, saved, self.policy) if self.policy is not None else full
        self.all_bytes = full.count_bytes
        reached = {n for op in tape.needs(saved, set())[0] for n in _results(tape, op)}
        self.collective_bytes = sum(tape.stores[n].count_bytes for n in reached)
        self.seen.update((tape.stores[n].weak.cdata, tape.stores[n].weak) for n in choice.kept)
        self._stale = {
            i
            for i, ref in enumerate(saved)
            if not tape.final(ref) or self._tensors[ref.storage]._version != self._counts[i]
        }
        tensors = {n: self._tensors.get(n) for n in choice.kept}
        for number, tensor in tensors.items():
            store = tape.stores[number]
            found = tensor if tensor is not None else store.held if store.held is not None else store.root
            assert found is not None
            tensors[number] = found
            self._versions[number] = found._version
        if choice.operations:
            self._replay = Replay(tape, choice.operations, choice.dropped, choice.kept)
        for ref in saved:
            self._uses[ref.storage] = self._uses.get(ref.storage, 0) + 1
        moved = {n for n in choice.kept if self.homes is not None and not tape.stores[n].parameter}
        self._tensors = {n: t for n, t in tensors.items() if t is not None and n not in moved}
        for number in sorted(moved):
            self._away[number] = self.homes.evict(tensors[number].untyped_storage())  # type: ignore[union-attr]
        for counter in counters():
            for number in choice.kept:
                store = tape.stores[number]
                counter.add_storage(store.weak, store.count_bytes, number in moved)

    # --- backward ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to fetch what rests on the host."""
        for away in self._away.values():
            away.begin()

    def unpack(self, index: int) -> torch.Tensor:
        """A saved tensor, fetched or computed again.

        Raises:
            NumbersError: it, or what it is computed from, was changed in place after it was saved.
        """
        ref = self._saved[index]
        if index in self._stale:
            raise self._changed()
        if not self._begun:
            self._begun = True
            self.begin()
            before = self._before() if self._before is not None else None
            if before is not None:
                before.begin()  # one block ahead of need
            if self._replay is not None and any(op.kind == COLLECTIVE for op in self._replay.operations):
                self._run()  # at the same moment on every rank, whatever each of them keeps
        assert self.choice is not None
        if ref.storage not in self.choice.dropped:
            return tapes.onto(self._kept(ref.storage), ref)
        if ref.storage not in self._again:
            self._run()
        storage = self._again[ref.storage]
        self._left[ref.storage] -= 1
        if not self._left[ref.storage]:
            del self._again[ref.storage]
        return tapes.onto(storage, ref)

    def _run(self) -> None:
        assert self._replay is not None
        with torch.no_grad():
            self._again = self._replay.run(self._kept)
        self._left = {n: self._uses.get(n, 1) for n in self._again}

    def _kept(self, number: int) -> torch.UntypedStorage:
        if number in self._away:
            return self._away[number].here()
        tensor = self._tensors[number]
        if tensor._version != self._versions[number]:
            raise self._changed()
        return tensor.untyped_storage()

    def _changed(self) -> NumbersError:
        return NumbersError(
            f"block {self.name}: a tensor that its backward needs was changed in place after it was saved. Write "
            "out-of-place there, or leave recompute and activations at their defaults to see torch's own message."
        )


class _Ticket:
    """What the graph holds in place of a saved tensor."""

    __slots__ = ("frame", "index")

    def __init__(self, frame: Frame, index: int) -> None:
        self.frame, self.index = frame, index


def _unpack(packed: Any) -> torch.Tensor:
    return packed.frame.unpack(packed.index) if isinstance(packed, _Ticket) else packed


def _results(tape: Tape, number: int) -> list[int]:
    operation = tape.operations[number]
    return [n for _, n in operation.makes] if operation.kind == COLLECTIVE else []
