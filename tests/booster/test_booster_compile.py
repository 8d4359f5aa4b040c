"""Compiled blocks: equal numbers, the same collectives under their names, and no silent way around the compiler."""

import booster_jobs
import pytest
import recompute_jobs as jobs
import torch

import lindos
from lindos.core.errors import RefusedError

PLANS = {
    "tp2": lindos.HybridParallel(tp=2, compile=True),
    "tp2 full": lindos.HybridParallel(tp=2, compile=True, recompute="full"),
}


@pytest.fixture(scope="module")
def plain(ranks):
    return ranks.run(jobs.compiled, 2, lindos.HybridParallel(tp=2))[0]


@pytest.mark.parametrize("plan", list(PLANS))
def test_compiled_numbers_are_equal_and_collectives_keep_their_names(ranks, plain, plan):
    one, other = plain, ranks.run(jobs.compiled, 2, PLANS[plan])[0]
    assert other["graphs"] > 0 == one["graphs"]
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-6)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(other["weights"][name], weight, rtol=1e-5, atol=1e-6)
    if plan == "tp2":
        assert sorted(other["calls"]) == sorted(one["calls"])
    if plan == "tp2 full":  # the whole block runs again: the sums behind attention and MLP of 2 layers in 2 steps
        assert len(other["calls"]) == len(one["calls"]) + 2 * 2 * 2
        assert set(other["calls"]) == set(one["calls"])


def test_proven_against_one_process(ranks):
    """In fp64 the proof's mode runs blocks uncompiled; in fp32 they are compiled, within one process's rounding."""
    report = lindos.prove(type="llama", dp=2, compile=True, recompute="full", steps=2, ranks=ranks)
    assert report.verdict == "equal", report


@pytest.mark.parametrize("home", ["device", "host"])
def test_code_that_runs_again_drops_the_same_elements(ranks, home):
    options = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    axes = {"tp": 2, "rules": "tests/rules/gpt2.toml"}
    one = ranks.run(jobs.run_again, 2, lindos.HybridParallel(**axes), "gpt2", options)[0]
    plan = lindos.HybridParallel(recompute="full", activations=home, **axes)
    other = ranks.run(jobs.run_again, 2, plan, "gpt2", options)[0]
    assert one["losses"] == other["losses"]
    for kind in ("gradients", "weights"):
        assert all(torch.equal(value, other[kind][name]) for name, value in one[kind].items())


def test_without_a_compiler_it_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RefusedError, match=r"compile=True needs a C\+\+ compiler.*Install g\+\+"):
        lindos.Booster(lindos.DDP(compile=True)).boost(booster_jobs.model_of())
