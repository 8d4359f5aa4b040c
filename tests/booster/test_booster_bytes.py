"""Bytes communicated a step equal the closed form of each axis; resident bytes equal the ledger's sum."""

import booster_jobs as jobs
import pytest


@pytest.fixture(scope="module")
def facts(ranks):
    return {name: ranks.run(jobs.bytes_of_step, *plan) for name, plan in jobs.PLANS.items()}


@pytest.mark.parametrize("plan", list(jobs.PLANS))
def test_dp_reduces_every_gradient_once(facts, plan):
    for mine in facts[plan]:
        seen = [c for c in mine["calls"] if c[2].startswith("chunk")]
        groups = [(group, size) for group, size in mine["chunks"] if _ranks(plan, group) > 1]
        assert [(c[1], c[3]) for c in seen] == groups
        for (group, size), call in zip(groups, seen):
            n = _ranks(plan, group)
            assert call[5] == pytest.approx(2 * (n - 1) / n * size * 4)


@pytest.mark.parametrize("plan", ["tp2", "tp4", "dp2xtp2"])
def test_tp_sums_two_activations_a_layer_each_way(facts, plan):
    for mine in facts[plan]:
        p = 4 if plan == "tp4" else 2
        tokens, hidden = mine["rows"] * mine["length"], mine["hidden"]
        seen = [c for c in mine["calls"] if c[1] == ("tp",) and not c[2].startswith("chunk")]
        sums = sum(c[5] for c in seen if c[0] == "all_reduce")
        # forward: attention and MLP of each layer, and the embedding; backward: the two inputs of each layer, and the
        # head's
        assert sums == pytest.approx((4 * mine["layers"] + 2) * 2 * (p - 1) / p * tokens * hidden * 4)
        loss = [c for c in seen if c[0] == "all_gather"]
        assert [c[5] for c in loss] == [pytest.approx((p - 1) / p * 2 * p * tokens * 4)]


@pytest.mark.parametrize("plan", list(jobs.PLANS))
def test_a_step_adds_two_small_collectives_over_the_world(facts, plan):
    for mine in facts[plan]:
        rest = [c for c in mine["calls"] if c[2] in ("batch", "step totals")]
        assert [c[2] for c in rest] == ([] if plan == "one" else ["batch", "step totals"])
        assert all(c[3] <= 4 * 4 for c in rest)


@pytest.mark.parametrize("plan", list(jobs.PLANS))
def test_resident_parameters_equal_the_ledger(facts, plan):
    for mine in facts[plan]:
        views, storages = mine["resident"]
        assert views == mine["ledger"]
        assert storages == mine["padded"]
        assert storages - views < 0.02 * views + 4096


def _ranks(plan, group):
    dp = 2 if plan.startswith("dp2") else 1
    tp = {"tp2": 2, "dp2xtp2": 2, "tp4": 4}.get(plan, 1)
    total = 1
    for axis in group:
        total *= {"dp": dp, "sp": 1, "tp": tp, "kv2_shared": max(1, tp // 2)}[axis]
    return total
