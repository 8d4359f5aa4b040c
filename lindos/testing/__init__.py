"""Ranks for tests of your own: a pool of processes, a group of threads, a world of which only one rank exists.

    from lindos.testing import pool, threads, fake, record

    def total(world, x):                              # a job is a function of a module: it travels by name
        return world.all_reduce(x * world.rank, "dp", "total")

    def test_total():
        x = torch.ones(3)
        assert pool().run(total, 4, x)[0].tolist() == [6, 6, 6]      # four processes, started once for all tests
        assert threads(total, 4, x)[3].tolist() == [6, 6, 6]         # four threads: quicker still

    def test_bytes():
        world = fake(1024, dp=128, tp=8)              # shapes, bytes and records are real, values are not
        with record() as seen:
            world.all_gather(torch.zeros(4, 16), "tp", 1, "weights")
        assert seen.received_bytes("tp") == 7 / 8 * 4 * 128 * 4

Starting a process costs seconds of imports, so keep one pool: in a session fixture, or as `pool()` does. A rank that
fails, dies or does not arrive gives a `RankError` that names it, and the pool goes on.
"""

from lindos.comm.launch import current
from lindos.comm.ranks import Ranks, fake, pool, single, threads
from lindos.comm.record import Call, Record, record
from lindos.comm.world import World

__all__ = ["Call", "Ranks", "Record", "World", "current", "fake", "pool", "record", "single", "threads"]
