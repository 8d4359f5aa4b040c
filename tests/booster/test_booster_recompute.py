"""Recompute: numbers bit-equal to "none", bytes equal to closed forms, no traffic that is not said."""

import booster_jobs
import pytest
import recompute_jobs as jobs
import torch
from torch import nn

import lindos
from lindos.booster.blocks import blocks_of
from lindos.core.errors import InputError, RefusedError

DROPPING = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
GPT2 = {"tp": 2, "rules": "tests/rules/gpt2.toml"}
CASES = {
    "llama-tp2-bf16": ("llama", {"attention_dropout": 0.1}, 2, {"tp": 2}, "bf16", ("full", 250_000)),
    "gpt2-tp2": ("gpt2", DROPPING, 2, GPT2, "fp32", ("full", "selective")),
    "mixtral-tp2": ("mixtral", {}, 2, {"tp": 2}, "fp32", ("selective",)),
    "mamba-dp2": ("mamba", {}, 2, {}, "fp32", ("full",)),
}


def same(one, other):
    """Every number bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("case", list(CASES))
def test_numbers_are_bit_equal_and_traffic_is_what_is_said(ranks, case):
    kind, options, size, axes, precision, settings = CASES[case]

    def run(recompute):
        plugin = lindos.HybridParallel(recompute=recompute, **axes)
        return ranks.run(jobs.trained, size, plugin, kind, options, precision)[0]

    none = run("none")
    for recompute in settings:
        other = run(recompute)
        for way in ("step", "loop"):
            assert same(none[way], other[way]), (recompute, way)
            if recompute == "selective":
                assert sorted(none[f"{way} calls"]) == sorted(other[f"{way} calls"])
            if recompute == "full" and axes:
                again = list(other[f"{way} calls"])
                for call in none[f"{way} calls"]:
                    again.remove(call)
                # the sum behind attention, of every layer in every forward; what comes last in a layer nobody reads
                assert len(again) == 2 * (4 if way == "step" else 2)
                assert {call[0] for call in again} == {"all_reduce"}
                assert all("attn" in call[1] for call in again), again


@pytest.mark.parametrize("tp", [1, 2])
def test_full_keeps_one_input_a_block(ranks, tp):
    plugin = lindos.HybridParallel(tp=tp, recompute="full")
    for two, three in zip(*zip(*ranks.run(jobs.saved, tp, plugin, "llama", {}, [(2, 12), (3, 12)]))):
        assert three[0] - two[0] == 8 * 12 * jobs.config_of("llama", {}).hidden_size * 4


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_selective_keeps_products_with_weights_and_no_square_of_the_length(ranks, tp, attention):
    options = {"_attn_implementation": attention}
    width = jobs.widths(jobs.config_of("llama", options), tp)
    rows, lengths = 8, (8, 16, 24)
    shapes = [(layers, length) for length in lengths for layers in (2, 3)]

    def a_layer(recompute):
        """Bytes of one layer at each length, on every rank."""
        plugin = lindos.HybridParallel(tp=tp, recompute=recompute)
        for found in ranks.run(jobs.saved, tp, plugin, "llama", options, shapes):
            yield [found[2 * i + 1][0] - found[2 * i][0] for i in range(len(lengths))]

    for of_rank in a_layer("selective"):
        # the block's input, q, k, v, the sum behind attention, gate and up
        features = 2 * width["hidden"] + width["query"] + 2 * width["key_value"] + 2 * width["inner"]
        if attention == "sdpa":  # its output, and the log-sum-exp of every head
            features += width["query"] + width["heads"]
        assert of_rank == [rows * length * features * 4 for length in lengths]
    if attention == "eager":
        for of_rank in a_layer("none"):
            # the softmax's output is all that grows with the square: its second difference is that of b a s^2
            square = of_rank[0] - 2 * of_rank[1] + of_rank[2]
            assert square == 2 * rows * width["heads"] * 8**2 * 4


@pytest.mark.parametrize(("kind", "tp"), [("llama", 2), ("mamba", 1), ("opt", 1), ("phi", 1), ("gpt_oss", 2)])
def test_a_budget_is_met_on_every_rank(ranks, kind, tp):
    shape = [(4, 12)]

    def run(recompute):
        plugin = lindos.HybridParallel(tp=tp, recompute=recompute)
        return [found[0][0] for found in ranks.run(jobs.saved, tp, plugin, kind, {}, shape)]

    full, none = max(run("full")), max(run("none"))
    for share in (0.0, 0.2, 0.3, 0.5, 0.8, 0.95):
        budget = int(full + share * (none - full))
        assert all(0.95 * budget <= found <= budget for found in run(budget)), share
    assert run(4 * none) == run("none")


def test_a_budget_too_small_is_one_error_on_all_ranks_that_says_the_smallest(ranks):
    messages = ranks.run(jobs.refused, 2, lindos.DDP(recompute=1000))
    assert len(set(messages)) == 1
    assert "InputError: recompute=1000: the smallest budget" in messages[0]
    smallest = int(messages[0].split(" is ")[1].split(" bytes")[0])
    assert ranks.run(jobs.refused, 2, lindos.DDP(recompute=smallest)) == ["", ""]
    assert "smallest budget" in ranks.run(jobs.refused, 2, lindos.DDP(recompute=smallest - 1))[0]


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"recompute": "selective", "activations": "host"}], ids=str)
def test_blocks_that_cannot_run_twice_run_once(ranks, options):
    """Random numbers of torch's own, counters and writes in place: no code of the block runs again."""
    assert same(ranks.run(jobs.hard, 2, lindos.DDP()), ranks.run(jobs.hard, 2, lindos.DDP(**options)))


@pytest.mark.parametrize(
    "options",
    [
        {"type": "llama", "tp": 2, "dp": 2, "recompute": 150_000, "micro_batches": 2},
        {"type": "gpt2", "tp": 2, "recompute": "full", "rules": "tests/rules/gpt2.toml"},
        {"type": "gemma3_text", "tp": 2, "recompute": "selective"},
        {"type": "mixtral", "tp": 2, "recompute": "full"},
        {"type": "mamba", "dp": 2, "recompute": "full", "steps": 2},
    ],
    ids=lambda options: options["type"],
)
def test_proven_against_one_process(ranks, options):
    report = lindos.prove(ranks=ranks, **options)
    assert report.verdict == "equal", report


def test_blocks_are_found_by_structure():
    assert [b.name for b in blocks_of(booster_jobs.model_of(layers=3), "x")] == [f"model.layers.{i}" for i in range(3)]
    assert [b.name for b in blocks_of(jobs.Stack(), "x")] == ["encoder.0", "encoder.1", "decoder.0"]
    embeddings = nn.ModuleList([nn.Embedding(3, 4), nn.Embedding(3, 4)])
    model = nn.ModuleDict({"embeddings": embeddings, "layers": nn.Sequential(jobs.Layer(4), jobs.Layer(4))})
    assert [b.name for b in blocks_of(model, "x")] == ["layers.0", "layers.1"]


def test_models_without_blocks_are_refused_by_name():
    with pytest.raises(RefusedError, match=r"recompute='full' needs blocks.*Linear has none"):
        lindos.Booster(lindos.DDP(recompute="full")).boost(nn.Linear(2, 2))
    side_by_side = nn.ModuleDict({name: nn.ModuleList([jobs.Layer(2), jobs.Layer(2)]) for name in ("attn", "ffn")})
    with pytest.raises(RefusedError, match=r"'attn' and 'ffn'.*stand side by side"):
        lindos.Booster(lindos.DDP(recompute="selective")).boost(side_by_side)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "selectiv"}, "did you mean 'selective'"),
        ({"recompute": True}, "an integer of bytes; got True"),
        ({"recompute": 1.5}, "an integer of bytes; got 1.5"),
        ({"recompute": 0}, "at least 1 byte"),
        ({"activations": "hots"}, "did you mean 'host'"),
        ({"compile": "yes"}, "True or False"),
    ],
    ids=str,
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(InputError, match=message):
        lindos.HybridParallel(**options)


def test_compiled_blocks_show_no_operations():
    with pytest.raises(RefusedError, match="a compiled block does not show its operations"):
        lindos.HybridParallel(compile=True, recompute="selective")


def test_describe_says_it():
    booster, _, _ = jobs.boosted(lindos.DDP(recompute=2**20, activations="host"), jobs.config_of("llama", {}))
    assert "recompute a budget of 1.00 MiB over 2 blocks; what they save rests on host" in booster.describe()
    assert "attention sdpa" in booster.describe()
