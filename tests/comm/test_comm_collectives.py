"""Every collective against plain math, on processes and threads, over axes and products of axes."""

import comm_jobs
import pytest
import torch

from lindos.comm.ranks import fake, single
from lindos.comm.record import record
from lindos.core.errors import InputError
from lindos.core.mesh import Mesh

TRANSPORTS = ["memory", "gloo", "threads"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_small(run, transport, size):
    sums = run(transport, comm_jobs.collectives, size)
    assert all(one == sums[0] for one in sums)


@pytest.mark.parametrize(("transport", "size"), [("memory", 2), ("memory", 4), ("gloo", 3), ("threads", 3)])
def test_larger_than_a_slot(run, transport, size):
    sums = run(transport, comm_jobs.large, size)
    assert all(one == sums[0] for one in sums)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_groups_of_axes(run, transport):
    mesh = Mesh.of(dp=2, tp=2)
    run(transport, comm_jobs.groups, 4, mesh, ["dp", "tp", ("dp", "tp"), ("tp", "dp"), "dp"])
    split = Mesh.of(tp=4).split("tp", row=2, col=2)
    run(transport, comm_jobs.groups, 4, split, ["col", "row", "tp", ("col", "row"), ("row", "col")])


RING = {2: (1, 0.5, 0.5, 0.5, 1), 3: (4 / 3, 2 / 3, 2 / 3, 2 / 3, 1), 4: (1.5, 0.75, 0.75, 0.75, 1)}
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_recorded_bytes(run, transport, size):
    expected = [(op, round(share * 4800)) for op, share in zip(OPS, RING[size])]
    for seen in run(transport, comm_jobs.recorded, size):
        assert seen == expected


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_record_holds_the_own_calls(run, transport):
    assert run(transport, comm_jobs.recorded_by_one, 3) == [5, 0, 0]


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_to_all"])
def test_what_does_not_divide(run, kind):
    for told in run("threads", comm_jobs.refuses, 3, kind):
        assert told.startswith("InputError")
        assert f"{kind} 'uneven' over dp" in told


def test_one_rank_is_plain():
    world = single()
    x = torch.randn(4, 3)
    with record() as seen:
        for turned in (x, x.mT):
            assert torch.equal(world.all_gather(turned, "dp", 1, "a"), turned)
            assert world.all_gather(turned, "dp", 1, "a").is_contiguous()
            assert world.reduce_scatter(turned, "dp", 0, "b").is_contiguous()
        assert torch.equal(world.all_to_all(x[None], "dp", "c"), x[None])
        assert world.broadcast(x, "dp", 0, "d") is x
        kept = x.clone()
        assert torch.equal(world.all_reduce(x, "dp", "e", fresh=True).add_(1), kept + 1)
    assert torch.equal(x, kept)
    assert not seen.calls
    assert world.exchange(7, "f") == [7]
    world.barrier("g")
    with pytest.raises(InputError, match="knows 'sum' and 'max'; got op='mean'"):
        world.all_reduce(x, "dp", "h", op="mean")
    with pytest.raises(InputError, match="mine"):
        world.agree(InputError("mine"), "h")


def test_a_fake_world_of_1024():
    world = fake(1024, rank=700, pp=2, dp=64, tp=8)
    assert (world.size, world.rank, world.title()) == (1024, 700, "[rank 700 | pp 1 dp 23 tp 4]")
    x = torch.randn(16, 128)
    with record() as seen:
        assert world.all_gather(x, "tp", 1, "a").shape == (16, 1024)
        assert world.reduce_scatter(x, "dp", 1, "b").shape == (16, 2)
        assert world.all_reduce(x, ("pp", "dp"), "c", fresh=True).shape == x.shape
        assert world.all_to_all(x.view(8, -1), "tp", "d").shape == (8, 256)
        assert world.all_gather(torch.zeros(1), world.all, 0, "e").shape == (1024,)
        world.broadcast(x, "pp", 1, "f")
    assert [call.received_bytes for call in seen.calls] == [
        7 / 8 * 16 * 1024 * 4,
        63 / 64 * 16 * 128 * 4,
        2 * 127 / 128 * 16 * 128 * 4,
        7 / 8 * 16 * 128 * 4,
        1023 * 4,
        16 * 128 * 4,
    ]
    assert len(world.exchange("mine", "g")) == 1024
    world.agree(None, "h")
