"""`prove` says equal for every family and plan of this version, and refuses what it cannot make equal."""

from pathlib import Path

import pytest

import lindos

GPT2_RULES = str(Path(__file__).parents[1] / "rules" / "gpt2.toml")
FAMILIES = ["llama", "qwen3", "mixtral", "gemma3_text", "phi3", "cohere2", "olmo2", "starcoder2", "gpt2"]
PLANS = {
    "dp2": {"dp": 2, "micro_batches": 1},
    "tp2": {"tp": 2, "micro_batches": 3, "twin": {"vocabulary": 131, "tied": False}},
    "dp2 x tp2": {"dp": 2, "tp": 2, "micro_batches": 3, "twin": {"tied": True}},
    "tp4, 2 kv heads": {"tp": 4, "micro_batches": 1, "twin": {"heads": 8, "kv_heads": 2, "vocabulary": 131}},
}


def _options(family, plan):
    options = {**PLANS[plan], "max_norm": 1.0}
    twin = dict(options.pop("twin", {}))
    if family == "gpt2":
        twin.pop("kv_heads", None)  # as many kv heads as heads
        options["rules"] = GPT2_RULES
    return {**options, "twin": twin}


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("family", FAMILIES)
def test_equal(ranks, family, plan):
    report = lindos.prove(type=family, ranks=ranks, **_options(family, plan))
    assert report.verdict == "equal", report.text()
    assert list(report.runs) == ["fp64 sgd", "fp32 sgd", "fp64 adamw", "fp32 adamw"]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_at_tp4(ranks, tied):
    twin = {"heads": 8, "kv_heads": 2, "vocabulary": 131, "tied": tied}
    assert lindos.prove(type="llama", tp=4, twin=twin, ranks=ranks).verdict == "equal"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dp": 2, "zero": 1, "micro_batches": 3, "twin": {"tied": True}}),
        ("llama", {"dp": 2, "tp": 2, "zero": 2, "micro_batches": 3, "twin": {"heads": 6, "kv_heads": 3}}),
        ("llama", {"dp": 2, "tp": 2, "zero": 1, "twin": {"heads": 4, "kv_heads": 1, "vocabulary": 131}}),
        ("mixtral", {"dp": 3, "zero": 2, "recompute": "full"}),
        ("mamba", {"dp": 4, "zero": 2, "zero_replicas": 2, "micro_batches": 2}),
    ],
)
def test_states_shared_over_dp(ranks, family, options):
    report = lindos.prove(type=family, steps=2, max_norm=1.0, ranks=ranks, **options)
    assert report.verdict == "equal", report.text()


def test_uneven_heads_are_equal_too(ranks):
    assert lindos.prove(type="llama", tp=3, twin={"heads": 4}, ranks=ranks).verdict == "equal"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"type": "llama", "tp": 2, "pp": 2}, "pipeline parallelism is not served yet"),
        ({"type": "llama", "dp": 2, "plugin": "gemini_auto"}, "not served yet"),
        ({"type": "llama", "tp": 8}, "tp=8 cannot cut 4 query heads"),
        ({"type": "gpt2", "tp": 2, "rules": {"tensor": {"transformer.h.*.mlp.c_f": "column"}}}, "matches no module"),
    ],
)
def test_refused_with_the_reason(ranks, options, words):
    report = lindos.prove(ranks=ranks, **options)
    assert report.verdict == "refused"
    assert report.exit_code == 3
    assert words in report.reason
