"""Ranks for tests, proofs and demos: a long-lived pool of processes, a group of threads, a fake world.

Starting a process costs seconds of imports; the pool pays them once, in a fork server, and runs any number of jobs of
any size after it.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist

from lindos.comm import launch, record
from lindos.comm.world import Link, World
from lindos.core.errors import LindosError, RankError
from lindos.core.mesh import Mesh

Job = Callable[..., Any]
PRELOAD = [  # what takes seconds to import, before ranks are forked: those of transformers arrive lazily otherwise
    "torch", "torch.distributed.tensor", "transformers", "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama", "lindos", "lindos.booster.booster", "lindos.proof.sides",
]  # fmt: skip


class Ranks:
    """A pool of processes, each with one torch thread.

    Example:
        ranks = Ranks(); ranks.run(job, 4, argument)  ->  [result of rank 0, ..., result of rank 3]
    """

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self._start = multiprocessing.get_context("forkserver")
        self._start.set_forkserver_preload([name for name in preload if _exists(name)])
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._job = 0

    def run(
        self,
        job: Job,
        size: int,
        *arguments: Any,
        transport: str = "memory",
        limit_seconds: float = 60,
        raises: bool = True,
    ) -> list[Any]:
        """Run `job(world, *arguments)` on `size` ranks and return their results in rank order.

        Args:
            job: a function of a module, since it travels by name.
            transport: "memory" or "gloo".
            limit_seconds: limit of one collective.
            raises: raise the first rank's error; if not, errors stand in the list in the place of results.

        Raises:
            RankError: a rank died.
        """
        self._grow(size)
        self._job += 1
        call = _Call(job, arguments, self._job, self._store.port, size, transport, limit_seconds)
        for rank in range(size):  # the path goes first: the job's module may lie where only the caller has looked yet
            packed = (rank, sys.path, bytes(ForkingPickler.dumps(call)))
            try:
                self._pipes[rank].send(packed)
            except ConnectionError:  # it died between two jobs: no job of this call has begun on it
                self._processes[rank].join()
                self._spawn(rank)
                self._pipes[rank].send(packed)
        results = self._collect(size)
        if raises:
            self._raise(results)
        return results

    def _collect(self, size: int) -> list[Any]:
        results: list[Any] = [None] * size
        waiting = {self._pipes[rank]: rank for rank in range(size)}
        while waiting:
            for pipe in wait(list(waiting)):
                rank = waiting.pop(pipe)  # type: ignore[index]
                try:
                    results[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self._processes[rank].join()
                    results[rank] = RankError(f"[rank {rank}] died with exit code {self._processes[rank].exitcode}.")
        return results

    @staticmethod
    def _raise(results: list[Any]) -> None:
        errors = [r for r in results if isinstance(r, BaseException)]
        first = next((e for e in errors if not isinstance(e, RankError)), errors[0] if errors else None)
        if first is not None:
            raise first

    def _grow(self, size: int) -> None:
        dead = [rank for rank, process in enumerate(self._processes) if not process.is_alive()]
        for rank in [*dead, *range(len(self._processes), size)]:
            self._spawn(rank)

    def _spawn(self, rank: int) -> None:
        ours, theirs = self._start.Pipe()
        process = self._start.Process(target=_serve, args=(theirs,), daemon=True, name=f"lindos-rank-{rank}")
        process.start()
        theirs.close()
        if rank < len(self._pipes):
            self._pipes[rank], self._processes[rank] = ours, process
        else:
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            rank, path, call = pipe.recv()
        except (EOFError, OSError):
            return
        sys.path[:] = path
        try:
            read = pickle.loads(call)
        except Exception as error:
            pipe.send(RankError(f"[rank {rank}] cannot read its job: {type(error).__name__}: {error}"))
            continue
        result = _work(rank, read)
        try:
            pipe.send(result)
        except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
            pipe.send(RankError(f"[rank {rank}] its result cannot travel: {error}"))


@dataclass(frozen=True)
class _Call:
    """One job as it travels to its ranks."""

    job: Job
    arguments: tuple
    number: int
    port: int
    size: int
    transport: str
    limit_seconds: float


@lru_cache(maxsize=1)
def _client(port: int) -> Any:
    """This process's connection to the pool's store, kept for all of its jobs."""
    return dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60), wait_for_workers=False)


def _work(rank: int, call: _Call) -> Any:
    store = dist.PrefixStore(f"job/{call.number}", _client(call.port))
    link = Link(rank, call.size, store, call.transport, torch.device("cpu"), call.limit_seconds)
    world = World(link, Mesh.of(dp=call.size))
    launch.enter(world)
    torch.manual_seed(0)
    try:
        if call.transport == "gloo":
            torch_store, longest = dist.PrefixStore("torch", store), timedelta(seconds=max(call.limit_seconds * 4, 30))
            dist.init_process_group("gloo", store=torch_store, rank=rank, world_size=call.size, timeout=longest)
        return call.job(world, *call.arguments)
    except LindosError as error:
        world.link.watch.report(error)
        return error.with_traceback(None)
    except Exception as error:
        world.link.watch.report(error)
        return RankError(f"[rank {rank}] {''.join(traceback.format_exception(error))}")
    finally:
        world.close()
        launch.enter(None)
        if call.transport == "gloo" and dist.is_initialized():
            _leave_gloo(link)


def _leave_gloo(link: Link) -> None:
    for made in link.groups.values():  # the last references: only then do connections close and peers that wait end
        if made is not None:
            made.group = None
    try:
        dist.destroy_process_group()
    except RuntimeError:  # a peer died in the middle of a collective; the group is of no more use anyway
        return


def threads(job: Job, size: int, *arguments: Any, limit_seconds: float = 60) -> list[Any]:
    """Run `job(world, *arguments)` on threads of this process: quick, for what needs no real process.

    Raises:
        BaseException: the first rank's own error.
    """
    store, lock, memory = dist.HashStore(), threading.Lock(), {}
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        link = Link(rank, size, store, "threads", torch.device("cpu"), limit_seconds, shared=memory)
        world = World(link, Mesh.of(dp=size))
        launch.enter(world)
        try:
            with record.rank_thread():
                results[rank] = job(world, *arguments)
        except BaseException as error:
            link.watch.report(error)
            results[rank] = error
        finally:
            world.close()

    memory["lock"] = lock
    started = [threading.Thread(target=body, args=(rank,), name=f"lindos-{rank}") for rank in range(size)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    Ranks._raise(results)
    return results


def fake(size: int, rank: int = 0, **axes: int) -> World:
    """A world of any size of which only one rank exists: shapes, bytes and records are real, values are not."""
    link = Link(rank, 1, dist.HashStore(), "fake", torch.device("cpu"), 60)
    link.size = size
    return World(link, Mesh.of(**axes) if axes else Mesh.of(dp=size))


def single(seed: int = 0) -> World:
    """A world of one process that is nobody's current one."""
    return World(Link(0, 1, dist.HashStore(), "threads", torch.device("cpu"), 60, seed), Mesh.of(dp=1))


_pool: list[Ranks] = []


def pool() -> Ranks:
    """The pool of this process, started at its first use."""
    if not _pool:
        _pool.append(Ranks())
        time.sleep(0)
    return _pool[0]
