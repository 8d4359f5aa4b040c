"""When a rank misbehaves, all others raise and name it, in time, and the pool goes on."""

import re

import comm_jobs
import pytest

SIZE, LIMIT_SECONDS, SLEEP_SECONDS = 3, 1.0, 2.5
DIFFERENT = r"rank 1 makes a different call|rank 1: a different call: waits"
TOLD = {
    "skips": DIFFERENT,
    "shape": DIFFERENT,
    "operation": DIFFERENT,
    "raises": r"rank 1: did not arrive; raised ValueError: a broken thing; last all_reduce #1 'first' over dp",
    "sleeps": r"rank 1: did not arrive; outside collectives; last all_reduce #1 'first' .*; at comm_jobs.py:\d+ misb",
    "dies": r"rank 1: did not arrive; gives no answer: dead",
    "returns": r"rank 1: did not arrive; gives no answer: dead, stopped or cut off",
}


@pytest.mark.parametrize("transport", ["memory", "gloo"])
@pytest.mark.parametrize("how", TOLD)
def test_all_others_name_the_rank(ranks, transport, how):
    results = ranks.run(
        comm_jobs.misbehaves,
        SIZE,
        how,
        SLEEP_SECONDS,
        transport=transport,
        limit_seconds=LIMIT_SECONDS,
        raises=False,
    )
    for rank in (0, 2):
        text, seconds = results[rank]
        assert re.match(rf"RankError: \[rank {rank}\] all_reduce #2 'second' over dp \[6\] float32", text), text
        assert re.search(TOLD[how], text), text
        assert re.search(rf"rank {2 - rank}: waits [\d.]+ s in all_reduce #2 'second'", text), text
        assert seconds < LIMIT_SECONDS + 5
    if how == "dies":
        assert "died with exit code 9" in str(results[1])
        if transport == "memory":
            assert any("Rank 1 is dead: its process has ended." in results[rank][0] for rank in (0, 2))
    elif how == "raises":
        assert "ValueError: a broken thing" in str(results[1])
    elif how == "sleeps":
        assert "all_reduce #2 'second' over dp [6] float32 is not begun" in results[1][0]
    elif how != "returns":
        assert results[1][0].startswith("RankError: [rank 1] all_"), results[1]
    assert ranks.run(comm_jobs.rank_of, SIZE, transport=transport) == [3, 3, 3]


@pytest.mark.parametrize("how", ["skips", "shape", "operation", "sleeps"])
def test_threads_too(run, how):
    results = run("threads", comm_jobs.misbehaves, SIZE, how, SLEEP_SECONDS, limit_seconds=LIMIT_SECONDS)
    for rank in (0, 2):
        assert re.search(TOLD[how], results[rank][0]), results[rank]


def test_a_thread_that_raises(run):
    with pytest.raises(ValueError, match="a broken thing"):
        run("threads", comm_jobs.misbehaves, SIZE, "raises", 0.0, limit_seconds=LIMIT_SECONDS)


@pytest.mark.parametrize("transport", ["memory", "gloo", "threads"])
def test_agreed_errors(run, transport):
    first, second, third = run(transport, comm_jobs.agreement, 3)
    assert first == [
        "LayoutError: [rank 1] 9 heads",
        "LayoutError: [rank 1, 2] 9 heads",
        "RankError: [rank 2] ValueError: odd",
        "RankError: all (its own)",
    ]
    own = "LayoutError: 9 heads (its own)"
    assert second == [own, own, first[2], first[3]]
    assert third == [first[0], own, "ValueError: odd (its own)", first[3]]


@pytest.mark.parametrize("transport", ["memory", "gloo", "threads"])
def test_exchanged_values(run, transport):
    values = [{"rank": rank, "text": "üüü"} for rank in range(3)]
    assert run(transport, comm_jobs.exchanged, 3) == [values] * 3


def test_exchanges_that_differ(run):
    told = run("threads", comm_jobs.another_exchange, 2)
    assert "exchange 'ours': rank 1 makes a different call, 'theirs'" in told[0]
    assert "exchange 'theirs': rank 0 makes a different call, 'ours'" in told[1]
