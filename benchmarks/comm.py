"""All-reduce over ranks of this host through shared memory and through gloo, taking turns. Milliseconds a call."""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))


def timed(world: Any, elements: int, count: int = 20) -> float:
    x = torch.ones(elements)
    for _ in range(3):
        world.all_reduce(x, "dp", "warm")
    world.barrier("start")
    started = time.perf_counter()
    for _ in range(count):
        world.all_reduce(x, "dp", "timed")
    return (time.perf_counter() - started) / count * 1e3


def main() -> None:
    import comm

    from lindos.comm.ranks import pool

    for size in (2, 4):
        for elements in (256, 1 << 18, 1 << 20):
            rounds = [
                [max(pool().run(comm.timed, size, elements, transport=kind)) for kind in ("memory", "gloo")]
                for _ in range(5)
            ]
            memory, gloo = (statistics.median(side) for side in zip(*rounds))
            ratio = statistics.median(a / b for a, b in rounds)
            print(f"{size} ranks, {4 * elements:>8} bytes: memory {memory:6.3f}  gloo {gloo:6.3f}  ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
