"""What of a block is kept for backward and what is computed again: by kind of operation, or by a budget in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lindos.memory.tape import ATTENTION, COLLECTIVE, LINEAR, Ref, Tape


@dataclass(frozen=True)
class Policy:
    """
    Attributes:
        kinds: operations whose results are kept where something computed again starts from them.
        budget_bytes: of one call of a block, filled up to it with what saves most work; None: only `kinds`.
    """

    kinds: frozenset[str] = frozenset()
    budget_bytes: int | None = None

    @property
    def holds(self) -> frozenset[str]:
        """Kinds that the tape must hold so that they can be kept."""
        return self.kinds if self.budget_bytes is None else self.kinds | {LINEAR, ATTENTION}


FULL = Policy()
CLOSE = 0.01  # a budget that is met but for this share is met
SELECTIVE = Policy(frozenset({COLLECTIVE, LINEAR, ATTENTION}))


@dataclass
class Choice:
    """
    Attributes:
        kept: storages to keep, roots among them.
        dropped: storages that backward reads and that are computed again.
        operations: that compute them.
        count_bytes: of what is kept, but for what is free: parameters, and what earlier blocks keep already.
    """

    kept: set[int]
    dropped: set[int]
    operations: set[int]
    count_bytes: int


def everything(tape: Tape, saved: Iterable[Ref]) -> Choice:
    """Keep all that backward reads, as without recompute."""
    kept = {ref.storage for ref in saved}
    return Choice(kept, set(), set(), _bytes(tape, kept))


def choose(tape: Tape, saved: list[Ref], policy: Policy) -> Choice:
    """Choose for one call of a block.

    What cannot run again is always kept, and so are the kinds that the policy names where something computed again
    starts from them. A budget is filled in the order of what it saves: products with weights and fused attention, then
    all else, each from the largest down to the smallest that fits.
    """
    able = tape.possible()
    read = {ref.storage for ref in saved if tape.stores[ref.storage].maker >= 0}
    forced = {ref.storage for ref in saved if ref.storage in read and not tape.readable(ref, able)}
    held = {n for n, store in enumerate(tape.stores) if store.held is not None}
    by_kind = {n for n in held if tape.stores[n].kind in policy.kinds}
    random = {n for n in held if tape.stores[n].kind not in policy.holds}
    if policy.budget_bytes is None:
        choice, full = _made(tape, saved, forced | random | by_kind, policy), everything(tape, saved)
        again = any(tape.operations[n].kind == COLLECTIVE for n in choice.operations)
        return choice if again or choice.count_bytes < full.count_bytes else full
    kept = forced | random | by_kind  # whether a collective runs again is agreed, and not decided by what fits here
    choice = _made(tape, saved, kept, policy)
    for candidates in (held, read, held | read, read):
        order = sorted(candidates - kept, key=lambda n: (_rank(tape.stores[n].kind), -tape.stores[n].count_bytes, n))
        room = policy.budget_bytes - choice.count_bytes
        for number in order:
            count_bytes = _bytes(tape, (number,))
            if count_bytes <= room:
                kept.add(number)
                room -= count_bytes
        choice = _made(tape, saved, kept, policy)
        kept &= choice.kept | random | forced | by_kind
    room = policy.budget_bytes - choice.count_bytes
    if room <= CLOSE * policy.budget_bytes:
        return choice
    # What fits one by one can leave much free. Begin again from what is forced, with the set that leaves least.
    always = kept & (forced | random | by_kind)
    least = _made(tape, saved, always, policy)
    for candidates in (kept | read, read):  # what backward reads itself is of use whatever else is kept
        numbers = sorted(candidates - tape.free - least.kept)
        other = always | _closest(tape, numbers, policy.budget_bytes - least.count_bytes)
        fuller = _made(tape, saved, other, policy)
        if choice.count_bytes < fuller.count_bytes <= policy.budget_bytes:
            choice = fuller
    return choice


def _closest(tape: Tape, numbers: list[int], room: int) -> set[int]:
    """Storages that together fill the room best; of those that fill it about as well, what saves most work.

    A search over the sums that can be reached, rounded up to a thousandth of the room.
    """
    unit = max(1, room // 1000)
    reached: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # units -> bytes that are dear to make, of what
    for number in numbers:
        store = tape.stores[number]
        size = -(-store.count_bytes // unit)
        dear = store.count_bytes if _rank(store.kind) < 2 else 0
        for units, (worth, chosen) in list(reached.items()):
            more = worth + dear, (*chosen, number)
            if (units + size) * unit <= room and more[0] >= reached.get(units + size, (0, ()))[0]:
                reached[units + size] = more
    enough = max(reached) - CLOSE * room / unit
    return set(max(found for units, found in reached.items() if units >= enough)[1])


def _rank(kind: str) -> int:
    return {COLLECTIVE: 0, LINEAR: 1, ATTENTION: 1}.get(kind, 2)


def _made(tape: Tape, saved: list[Ref], kept: set[int], policy: Policy) -> Choice:
    """The choice that keeps these where they are of use."""
    needed = [ref for ref in saved if ref.storage not in kept]
    dropped = {ref.storage for ref in needed if tape.stores[ref.storage].maker >= 0}
    operations, start = tape.needs(needed, kept)
    if COLLECTIVE not in policy.kinds:
        operations, start = _with_collectives(tape, saved, kept, operations, start)
    kept = start | {ref.storage for ref in saved if ref.storage not in dropped}
    return Choice(kept, dropped, operations, _bytes(tape, kept))


def _with_collectives(
    tape: Tape, saved: list[Ref], kept: set[int], operations: set[int], start: set[int]
) -> tuple[set[int], set[int]]:
    """All collectives that lead to what backward reads run again, whatever else a rank keeps: ranks must agree."""
    all_again, _ = tape.needs(saved, set())
    calls = {n for n in all_again if tape.operations[n].kind == COLLECTIVE}
    for number in calls - operations:
        operations.add(number)
        more, begin = tape.needs(tape.operations[number].reads(), kept)
        operations |= more
        start |= begin
    return operations, start


def _bytes(tape: Tape, numbers: Iterable[int]) -> int:
    return sum(tape.stores[n].count_bytes for n in numbers if n not in tape.free)
