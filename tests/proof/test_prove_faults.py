"""Each planted fault is found and named: a proof that cannot fail proves nothing."""

import json

import pytest

import lindos
from lindos.core.errors import InputError
from lindos.proof.faults import FAULTS, VARIANTS

PLANS = {
    "wrong kv group": {"tp": 2, "twin": {"kv_heads": 2}},
    "tied gradient twice": {"tp": 2, "twin": {"tied": True}},
}


def test_there_are_twelve():
    assert len(FAULTS) == 12


@pytest.mark.parametrize("fault", [*FAULTS, *VARIANTS])
def test_named(ranks, fault):
    report = lindos.prove(type="llama", max_norm=0.5, fault=fault, ranks=ranks, **PLANS.get(fault, {"dp": 2}))
    name = {**FAULTS, **VARIANTS}[fault].name
    assert report.verdict == "differs", report.text()
    assert report.exit_code == 4
    assert report.reason.startswith(name), report.text()
    facts = json.loads(report.json())
    assert facts["verdict"] == "differs"
    assert facts["differences"][0]["by"] > 0


@pytest.mark.parametrize("fault", ["sum for mean", "stale chunk", "reduce skipped or doubled"])
def test_named_on_a_mixed_plan_too(ranks, fault):
    report = lindos.prove(type="qwen3", dp=2, tp=2, micro_batches=3, max_norm=0.5, fault=fault, ranks=ranks)
    assert report.reason.startswith(fault), report.text()


@pytest.mark.parametrize(
    "options", [{}, {"type": "llama", "model": "x"}, {"type": "llama", "plugin": "dpd"}, {"type": "llama", "tq": 2}]
)
def test_bad_options_are_errors(ranks, options):
    with pytest.raises(InputError):
        lindos.prove(ranks=ranks, **options)


def test_unknown_fault_names_the_nearest(ranks):
    with pytest.raises(InputError, match="sum for mean"):
        lindos.prove(type="llama", fault="sum for means", ranks=ranks)
