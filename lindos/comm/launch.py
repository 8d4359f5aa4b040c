"""Rendezvous: from torchrun, Slurm, OpenMPI or a single process to a world. Only this file reads the environment."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lindos.comm.world import Link, World, host_name, shared_memory_serves
from lindos.core.errors import InputError
from lindos.core.mesh import Mesh

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_LOCAL = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_current = threading.local()
_process: list[World] = []
_left: list[World] = []


def launch(seed: int = 0, timeout_seconds: float = 600) -> World:
    """Join the other processes and return the world, on a mesh of one axis until a booster lays out its own.

    Under torchrun, Slurm and OpenMPI rank and size come from their environment; without them the world is this one
    process. Sets torch's seed, so that models built after it on different ranks are equal.

    Args:
        seed: for initialisation, dropout and data order.
        timeout_seconds: limit of one collective, after which all ranks raise and name who did not arrive.

    Raises:
        InputError: the environment contradicts itself.
    """
    if _process:
        raise InputError("lindos.launch() is called once in a process; it was called before.")
    if not timeout_seconds > 0:
        raise InputError(f"timeout_seconds must be positive; got {timeout_seconds!r}.")
    rank, size, local = place()
    device = device_of(local)
    torch.manual_seed(seed)
    store = _store(rank, size, timeout_seconds) if size > 1 else dist.HashStore()
    if size > 1:
        transport = _connect(store, rank, size, device, timeout_seconds)
    else:
        transport = "threads"
    world = World(Link(rank, size, store, transport, device, timeout_seconds, seed), Mesh.of(dp=size))
    _process.append(world)
    _tell_others_on_exit(world)
    return world


def current() -> World:
    """The world of this thread or process, launched with defaults if there is none yet."""
    world = getattr(_current, "world", None)
    return world or (_process[0] if _process else launch())


def launched() -> World | None:
    """The world of this process, if there is one yet."""
    return _process[0] if _process else None


def leave(world: World, seconds: float = 5.0) -> None:
    """The end of a rank. The first keeps the store, so it goes last; a rank that is stuck is waited for in vain."""
    world.close()
    if world.size == 1 or world in _left:
        return
    _left.append(world)
    store, keys = world.link.store, [f"left/{rank}" for rank in range(1, world.size)]
    until = time.monotonic() + seconds
    with contextlib.suppress(Exception):  # the store is gone with the rank that kept it: nobody is left to tell
        if world.rank > 0:
            store.set(f"left/{world.rank}", "1")
        while world.rank == 0 and not store.check(keys) and time.monotonic() < until:
            time.sleep(0.02)


def enter(world: World | None) -> None:
    """Make a world current for this thread: for pools and threaded groups."""
    _current.world = world


def device_of(local: int) -> torch.device:
    """The accelerator of a local rank where there is one, else the CPU."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        torch.accelerator.set_device_index(local % torch.accelerator.device_count())
        return torch.device(kind.type, local % torch.accelerator.device_count())
    return torch.device("cpu")


def place(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """Rank, world size and local rank that the environment tells.

    Raises:
        InputError: it contradicts itself.
    """
    size = _first(environment, _SIZE, 1)
    rank = _first(environment, _RANK, 0 if size == 1 else None)
    if not 0 <= rank < size:
        raise InputError(f"the environment says rank {rank} of {size} processes; a rank is in 0..{size - 1}.")
    return rank, size, _first(environment, _LOCAL, rank)


def _first(environment: Mapping[str, str], names: tuple[str, ...], default: int | None) -> int:
    for name in names:
        text = environment.get(name)
        # Slurm sets its variables in interactive shells and batch scripts too; only a task started by srun has a step.
        if text is None or (name.startswith("SLURM") and "SLURM_STEP_ID" not in environment):
            continue
        least = 1 if names is _SIZE else 0
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise InputError(f"environment variable {name} must be a number from {least}; got {text!r}.")
        return int(text)
    if default is None:
        raise InputError(
            f"more than one process, but none of {', '.join(names)} is set. Start with torchrun or lindos run."
        )
    return default


def _meeting(environment: Mapping[str, str]) -> tuple[str, int]:
    """Where rank 0 listens: as torchrun says, else as Slurm or OpenMPI let it be known.

    Raises:
        InputError: nothing says so.
    """
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    job = environment.get("SLURM_JOB_ID", "")
    if "SLURM_STEP_ID" in environment:
        address = address or environment.get("SLURM_LAUNCH_NODE_IPADDR")
        port = port or (str(20_000 + int(job) % 20_000) if job.isdigit() else None)
    size = environment.get("OMPI_COMM_WORLD_SIZE")
    if size is not None and size == environment.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        address, port = address or "127.0.0.1", port or "29500"
    if not address or not port or not port.isdigit():
        raise InputError(
            "MASTER_ADDR and MASTER_PORT must name where rank 0 listens, got "
            f"{address!r} and {port!r}. torchrun and lindos run set them; under mpirun over several hosts export both."
        )
    return address, int(port)


def _store(rank: int, size: int, timeout_seconds: float) -> Any:
    address, port = _meeting(os.environ)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = timedelta(seconds=max(timeout_seconds, 30))
    store = dist.TCPStore(address, port, size, rank == 0 and not agent, timeout=limit, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"lindos/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}", store)


def _connect(store: Any, rank: int, size: int, device: torch.device, timeout_seconds: float) -> str:
    """torch's default process group, for user code and for what shared memory does not reach."""
    hosts = [host_name() if r == rank else "" for r in range(size)]
    store.set(f"host/{rank}", hosts[rank])
    store.wait([f"host/{r}" for r in range(size)])
    hosts = [store.get(f"host/{r}").decode() for r in range(size)]
    backend = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
    limit = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, store=dist.PrefixStore("torch", store), rank=rank, world_size=size, timeout=limit)
    if backend != "gloo":
        return "nccl"
    return "memory" if shared_memory_serves(hosts) and not os.environ.get("LINDOS_GLOO") else "gloo"


def _tell_others_on_exit(world: World) -> None:
    """An exception that ends this process is told to the others before it is printed."""
    if world.size == 1:
        return
    before = sys.excepthook

    def hook(kind: type, error: BaseException, trace: Any) -> None:
        world.link.watch.report(error)
        before(kind, error, trace)

    sys.excepthook = hook
    atexit.register(leave, world)
