"""The pool of ranks: results in order, errors of the first rank, what cannot travel, seeds by name."""

import comm_jobs
import pytest
import torch

import lindos.testing
from lindos.comm.ranks import Ranks, pool
from lindos.comm.seeds import seed_of
from lindos.core.errors import LayoutError, RankError


def test_results_in_rank_order(ranks):
    assert ranks.run(comm_jobs.fails, 3, "nothing") == [0, 1, 2]
    assert ranks.run(comm_jobs.fails, 1, "nothing") == [0]
    assert pool() is ranks


def test_tensors_travel(ranks):
    x = torch.arange(6.0).view(2, 3)
    for back in ranks.run(comm_jobs.echo, 2, {"x": x, "text": "ü"}):
        assert torch.equal(back["x"], x)
        assert back["text"] == "ü"


def test_errors_of_lindos_keep_their_class(ranks):
    with pytest.raises(LayoutError, match="cannot cut"):
        ranks.run(comm_jobs.fails, 2, "layout")
    results = ranks.run(comm_jobs.fails, 2, "layout", raises=False)
    assert results[0] == 0
    assert isinstance(results[1], LayoutError)


def test_other_errors_bring_their_traceback(ranks):
    with pytest.raises(RankError, match=r"(?s)\[rank 1\] Traceback.*comm_jobs.py.*ValueError: cannot count"):
        ranks.run(comm_jobs.fails, 2, "value")


def test_what_cannot_travel(ranks):
    with pytest.raises(RankError, match="its result cannot travel"):
        ranks.run(comm_jobs.fails, 2, "travel")
    with pytest.raises((AttributeError, TypeError, ValueError), match=r"pickle|local"):
        ranks.run(lambda world: 0, 2)
    assert ranks.run(comm_jobs.fails, 2, "nothing") == [0, 1]


def test_a_job_of_a_module_found_later(ranks, tmp_path, monkeypatch):
    ranks.run(comm_jobs.fails, 2, "nothing")
    (tmp_path / "job_written_later.py").write_text("def job(world):\n    return world.rank + 10\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import job_written_later  # pyright: ignore[reportMissingImports]

    assert ranks.run(job_written_later.job, 2) == [10, 11]
    (tmp_path / "job_written_later.py").unlink()


def test_a_pool_of_its_own_survives_a_rank_that_is_killed():
    made = Ranks(["torch", "no_such_module", "lindos.no.such.module"])
    try:
        assert made.run(comm_jobs.rank_of, 2) == [1, 1]
        made._processes[1].kill()
        made._processes[1].join()
        assert made.run(comm_jobs.rank_of, 2) == [1, 1]
    finally:
        made.close()
    assert not any(process.is_alive() for process in made._processes)


def test_public_names():
    assert {"Ranks", "World", "fake", "pool", "record", "single", "threads"} <= set(lindos.testing.__all__)
    assert all(hasattr(lindos.testing, name) for name in lindos.testing.__all__)
    assert lindos.testing.threads(comm_jobs.rank_of, 3) == [3, 3, 3]


def test_seeds():
    seeds = {
        seed_of(seed, *names) for seed in range(20) for names in [("init",), ("init", "a.b"), ("data", 3), (1, "x")]
    }
    assert len(seeds) == 80
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(0, "init", "model.embed_tokens") == 8649261118327535908, "old runs can no longer be repeated"
    torch.Generator().manual_seed(max(seeds))
