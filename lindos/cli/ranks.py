"""Local ranks: N processes of one command on this machine, and the one exit code that they come to."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

EXIT_RANK, EXIT_STOPPED = 5, 75
GRACE_SECONDS = 8.0  # after the first failure: time for the verdict that names it
POLL_SECONDS = 0.05


def start(command: Sequence[str], count: int) -> int:
    """Runs `count` copies of a command as ranks 0 to count - 1 and waits for all.

    A signal is passed on once, a second one kills. When a rank fails, the others get a few seconds to say so, then they
    are ended. Ranks that die with this process do not outlive it (Linux).

    Returns:
        The exit code of the first rank that failed (5 where a signal killed it), 75 if any stopped after saving, 0 if
        all are done.
    """
    ranks = [subprocess.Popen(list(command), **_options(rank, count)) for rank, count in _places(count)]
    with _passing_on(ranks):
        code = _wait(ranks)
    return code


def _places(count: int) -> Iterator[tuple[int, dict[str, str]]]:
    environment = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // count)))
    for rank in range(count):
        yield rank, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _options(rank: int, environment: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {"env": environment, "stdin": subprocess.DEVNULL}
    # A session of their own: Ctrl-C on the terminal reaches only this process, which passes it on once.
    options["start_new_session"] = True
    if sys.platform == "linux":
        options["preexec_fn"] = _die_with_parent
    return options


def _die_with_parent() -> None:
    """Asks the kernel for SIGTERM when the parent is gone."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _wait(ranks: list[subprocess.Popen]) -> int:
    first_failure: int | None = None
    stopped, deadline = False, float("inf")
    running = dict(enumerate(ranks))
    while running:
        for rank, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[rank]
            stopped = stopped or code == EXIT_STOPPED
            if code in (0, EXIT_STOPPED):
                continue
            if code < 0:
                print(f"rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
            if first_failure is None:
                first_failure = EXIT_RANK if code < 0 or code > 127 else code
                deadline = time.monotonic() + GRACE_SECONDS
        if running and time.monotonic() > deadline:
            _end(list(running.values()))
            deadline = float("inf")
        time.sleep(POLL_SECONDS)
    return first_failure if first_failure is not None else EXIT_STOPPED if stopped else 0


def _end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


@contextlib.contextmanager
def _passing_on(ranks: list[subprocess.Popen]) -> Iterator[None]:
    """SIGTERM and SIGINT go to every rank as SIGTERM; the second kills."""
    seen = 0

    def pass_on(number: int, frame: Any) -> None:
        nonlocal seen
        seen += 1
        for process in ranks:
            if process.poll() is None:
                process.kill() if seen > 1 else process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
