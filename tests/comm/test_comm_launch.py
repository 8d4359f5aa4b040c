"""Rank and size from torchrun, Slurm, OpenMPI or nothing; contradictions; two real processes that meet."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from lindos.comm import launch
from lindos.core.errors import InputError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "2"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1, 0)),
        (TORCHRUN, (3, 4, 1)),
        (SLURM | {"SLURM_STEP_ID": "0"}, (5, 8, 2)),
        (SLURM, (0, 1, 0)),
        (SLURM | TORCHRUN, (3, 4, 1)),
        (SLURM | {"SLURM_STEP_ID": "0"} | TORCHRUN, (3, 4, 1)),
        (OPENMPI, (1, 2, 0)),
        (OPENMPI | SLURM, (1, 2, 0)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 1, 0)),
        ({"LOCAL_RANK": "3"}, (0, 1, 3)),
    ],
)
def test_place(environment, place):
    assert launch.place(environment) == place


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "4"}, "more than one process, but none of RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK is set"),
        ({"WORLD_SIZE": "4", **SLURM}, "more than one process, but none of"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, r"rank 4 of 4 processes; a rank is in 0\.\.3"),
        ({"RANK": "3"}, "rank 3 of 1 processes"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "rank 1 of 1 processes"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE must be a number from 1; got '0'"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK must be a number from 0; got '-1'"),
        ({"RANK": "0", "WORLD_SIZE": "four"}, "WORLD_SIZE must be a number from 1; got 'four'"),
    ],
)
def test_contradictions(environment, message):
    with pytest.raises(InputError, match=message):
        launch.place(environment)


@pytest.fixture
def alone(monkeypatch):
    """An environment without any launcher, in a process that has not launched."""
    for name in (*launch._RANK, *launch._SIZE, *launch._LOCAL, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "_process", [])
    return monkeypatch


def test_one_process(alone):
    world = launch.launch(seed=7)
    first = torch.rand(3)
    assert (world.size, world.rank, world.seed, str(world.mesh)) == (1, 0, 7, "dp=1")
    assert launch.current() is world
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(3))
    with pytest.raises(InputError, match="called once"):
        launch.launch()


def test_current_launches_and_threads_have_their_own(alone):
    from lindos.comm.ranks import single

    other = single()
    launch.enter(other)
    try:
        assert launch.current() is other
    finally:
        launch.enter(None)
    assert launch.current() is launch.current() is not other


def test_bad_arguments(alone):
    with pytest.raises(InputError, match="timeout_seconds must be positive; got 0"):
        launch.launch(timeout_seconds=0)
    alone.setenv("RANK", "0")
    alone.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="MASTER_ADDR and MASTER_PORT"):
        launch.launch()


SCRIPT = """
import sys, torch, lindos.comm.launch as launch
world = launch.launch(seed=1, timeout_seconds=30)
plain = torch.tensor(world.rank)
torch.distributed.all_reduce(plain)
print(world.all_reduce(torch.tensor(world.rank + 1), "dp", "sum").item(), plain.item(), torch.rand(1).item())
sys.stdout.flush()
if world.rank == 1:
    raise ValueError("a broken thing")
world.all_reduce(torch.ones(2), "dp", "second")
"""


def test_two_processes_meet_and_one_breaks(alone):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", SCRIPT]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=common | {"RANK": str(rank)}, **pipes) for rank in range(2)]
    (out, error), (other_out, other_error) = [process.communicate(timeout=60) for process in started]
    assert out == other_out
    assert out.startswith("3 1 0.")
    assert "ValueError: a broken thing" in other_error
    assert "RankError: [rank 0] all_reduce #2 'second'" in error
    assert "rank 1: did not arrive; raised ValueError: a broken thing" in error
    assert [process.returncode for process in started] == [1, 1]


@pytest.mark.parametrize(
    ("environment", "meeting"),
    [
        ({"MASTER_ADDR": "a", "MASTER_PORT": "5"}, ("a", 5)),
        ({"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "41", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}, ("10.0.0.1", 20_041)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("127.0.0.1", 29_500)),
    ],
)
def test_where_rank_0_listens(environment, meeting):
    assert launch._meeting(environment) == meeting


@pytest.mark.parametrize(
    "environment", [{}, {"MASTER_ADDR": "a"}, {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}]
)
def test_nothing_says_where_rank_0_listens(environment):
    with pytest.raises(InputError, match="MASTER_ADDR"):
        launch._meeting(environment)
