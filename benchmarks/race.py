"""The race: lindos against the faster of its peers on the same small job, both sides interleaved in one run.

    python benchmarks/race.py                  every race, fp32 and bf16, five rounds
    python benchmarks/race.py --rounds 3 --precision fp32

Each round times a few steps of every side, taking turns step by step. The ratio is the median of the rounds' paired
ratios, printed with its smallest and largest. The limit is the same FLOPs at the measured matmul rate. Peak memory is
measured in processes of their own, one side each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

RACES = [
    ("lindos TP2", ("transformers TP2", "DTensor TP2"), {"fp32": 0.75, "bf16": 0.68}),
    ("lindos DDP", ("torch DDP",), {"fp32": 1.02, "bf16": 1.02}),
]


def rank_main(arguments: argparse.Namespace) -> None:
    """One rank: make the sides, run the rounds, print the result on rank 0."""
    import torch

    torch.set_num_threads(1)
    import lindos

    lindos.launch()
    sys.path.insert(0, str(Path(__file__).parent))
    import peers

    bf16 = arguments.precision == "bf16"
    names = arguments.sides.split(",")
    steps = {name: peers.SIDES[name](bf16) for name in names}
    rank = int(os.environ["RANK"])
    times: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(arguments.rounds + 1):
        seen: dict[str, list[float]] = {name: [] for name in names}
        for i in range(arguments.steps):
            turn = (round_number + i) % len(names)
            for name in names[turn:] + names[:turn]:  # sides take turns step by step: the machine's drift meets all
                batch = peers.batch_of(100 * round_number + i + (0 if name in peers.SHARED_ROWS else 10_000 * rank))
                _meet()
                started = time.perf_counter()
                losses[name].append(steps[name](batch))
                seen[name].append(time.perf_counter() - started)
        if round_number:  # the first round warms up
            for name in names:
                times[name].append(statistics.median(seen[name]))
    if rank == 0:
        rate = _matmul_rate(torch, bf16)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        last = {name: seen[-1] for name, seen in losses.items()}
        print(json.dumps({"times": times, "losses": last, "rate": rate, "peak_mib": peak_mib}))


def _meet() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def _matmul_rate(torch: object, bf16: bool) -> float:
    """FLOP a second of one thread on a matmul of the job's size, best of five."""
    import torch

    dtype = torch.bfloat16 if bf16 else torch.float32
    a, b = torch.randn(1024, 256, dtype=dtype), torch.randn(256, 688, dtype=dtype)
    best = 1e9
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(20):
            a @ b
        best = min(best, (time.perf_counter() - started) / 20)
    return 2 * 1024 * 256 * 688 / best


def job_flops() -> float:
    """FLOPs of a step of the whole job: 6 a parameter and token in matmuls, 12 L H T a token in attention."""
    parameters = 8 * (4 * 256 * 256 + 3 * 256 * 688) + 4096 * 256
    return 1024 * (6 * parameters + 12 * 8 * 256 * 256)


def run(sides: list[str], precision: str, rounds: int, steps: int, ranks: int = 2) -> dict:
    """Start the ranks of one run and read what rank 0 printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--rank-of", "--sides", ",".join(sides), "--precision", precision]
    command += ["--rounds", str(rounds), "--steps", str(steps)]
    base = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            command, env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"a side of {sides} failed")
    return json.loads(outputs[0].strip().splitlines()[-1])


def race(
    lindos_side: str, others: tuple[str, ...], precision: str, limit: float, arguments: argparse.Namespace
) -> bool:
    """Print one race; true if the ratio is within the limit."""
    result = run([lindos_side, *others], precision, arguments.rounds, arguments.steps)
    times = result["times"]
    medians = {name: statistics.median(seen) for name, seen in times.items()}
    best = min(others, key=lambda name: medians[name])
    ratios = [a / b for a, b in zip(times[lindos_side], times[best])]
    ratio = statistics.median(ratios)
    floor = job_flops() / result["rate"] / (2 if "TP" in lindos_side else 1)
    print(f"{lindos_side}, {precision}: {ratio:.3f} x {best} [{min(ratios):.3f}, {max(ratios):.3f}], asked {limit:.2f}")
    for name, median in medians.items():
        print(f"    {name:18} {1e3 * median:7.1f} ms a step   last loss {result['losses'][name]:.4f}")
    print(
        f"    {'limit':18} {1e3 * floor:7.1f} ms: the FLOPs at {result['rate'] / 1e9:.0f} GF/s a thread; lindos "
        f"is {medians[lindos_side] / floor:.2f} x it"
    )
    peaks = {name: run([name], precision, 1, 2)["peak_mib"] for name in (lindos_side, *others)}
    print("    peak MiB of rank 0: " + ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items()), flush=True)
    return ratio <= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--precision", choices=("fp32", "bf16"))
    parser.add_argument("--only", help="name of one lindos side")
    parser.add_argument("--sides", help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments)
        return 0
    good = True
    for lindos_side, others, limits in RACES:
        for precision, limit in limits.items():
            if arguments.precision in (None, precision) and arguments.only in (None, lindos_side):
                good &= race(lindos_side, others, precision, limit, arguments)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
