"""Every plan is the same training run as one process: step, loop, logits, losses of the user's own."""

import booster_jobs as jobs
import pytest
import torch

ALL = jobs.PLANS | jobs.ZERO
OTHERS = [name for name in ALL if name != "one"]


@pytest.fixture(scope="module")
def on(ranks):
    made = {}

    def run(job, plan, *arguments):
        key = (job.__name__, plan, *map(str, arguments))
        if key not in made:
            size, plugin = ALL[plan]
            made[key] = ranks.run(job, size, plugin, *arguments)
        return made[key]

    return run


def close(a, b, tolerance=1e-11):
    for name in b:
        assert torch.allclose(a[name], b[name], rtol=0, atol=tolerance * float(b[name].abs().max() + 1e-9)), name


@pytest.mark.parametrize("plan", list(ALL))
def test_step_and_loop_agree_and_equal_one_process(on, plan):
    one, results = on(jobs.step_and_loop, "one")[0], on(jobs.step_and_loop, plan)
    for mine in results:
        assert mine["step"][0] == pytest.approx(one["step"][0], abs=1e-12)
        assert mine["loop"][0] == pytest.approx(one["step"][0], abs=1e-12)
        close(mine["step"][1], one["step"][1])
        close(mine["loop"][1], one["step"][1])
        assert torch.allclose(mine["gradient"], one["gradient"], atol=1e-12)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("plan", OTHERS)
def test_backwards_add_up_as_on_one_process(on, plan, first):
    for mine in on(jobs.accumulated, plan, first):
        close(mine, on(jobs.accumulated, "one")[0])


@pytest.mark.parametrize("plan", OTHERS)
def test_logits_are_whole_and_differentiable(on, plan):
    one = on(jobs.logits_and_own_loss, "one")[0]
    for rank, mine in enumerate(on(jobs.logits_and_own_loss, plan)):
        size, plugin = ALL[plan]
        parts, coordinate = size // plugin.tp, rank // plugin.tp
        assert torch.allclose(mine["logits"], one["logits"].chunk(parts)[coordinate], atol=1e-12)
        close(mine["gradients"], one["gradients"])


@pytest.mark.parametrize("plan", list(ALL))
@pytest.mark.parametrize("pieces", [1, 3])
def test_micro_batches_change_nothing(on, plan, pieces):
    one = on(jobs.micro_batches, "one", 1)[0]
    for mine in on(jobs.micro_batches, plan, pieces):
        assert mine[0] == pytest.approx(one[0], abs=1e-12)
        assert mine[1] == pytest.approx(one[1], rel=1e-11)
        close(mine[2], one[2])


@pytest.mark.parametrize("plan", OTHERS)
def test_own_loss_function_is_normalised_by_its_global_count(on, plan):
    one, default = on(jobs.own_loss, "one")[0], on(jobs.micro_batches, "one", 1)
    assert default  # the default loss runs in the same module: both go through one step
    for loss, metrics, count, weight in on(jobs.own_loss, plan):
        assert loss == pytest.approx(one[0], abs=1e-12)
        assert metrics == pytest.approx(one[1], abs=1e-12)
        assert count == one[2]
        assert torch.allclose(weight, one[3], atol=1e-13)


@pytest.mark.parametrize("plan", list(ALL))
def test_evaluate_takes_different_numbers_of_batches(on, plan):
    one = on(jobs.evaluated, "one")[0]
    for loss, count, training in on(jobs.evaluated, plan):
        assert loss == pytest.approx(one[0], abs=1e-12)
        assert count == one[1]
        assert training


@pytest.mark.parametrize("plan", ["tp2"])
def test_router_loss_is_equal_where_shares_are_not_cut(on, plan):
    one = on(jobs.routed, "one")[0]
    config = jobs.twin_config("mixtral", **jobs.WIDE)
    config.output_router_logits = True
    model = jobs.twin(config, seed=1)
    own = model(**jobs.joined_batch(config, 0)).loss  # transformers' own loss, its router's part included
    assert one[0] == pytest.approx(float(own.detach()), rel=1e-5)  # which is taken in fp32
    for mine in on(jobs.routed, plan):
        assert mine == pytest.approx(one, rel=1e-7)  # the router's softmax is fp32 in transformers


def test_two_models_in_one_process_do_not_meet(on):
    assert on(jobs.two_models, "tp2")[0] == pytest.approx(on(jobs.two_models, "one")[0], abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3}),
        ("llama", {"attention_dropout": 0.3}),
        ("dbrx", {"attn_config.attn_pdrop": 0.3}),
    ],
)
def test_dropout_is_the_same_under_every_plan(ranks, kind, options):
    from pathlib import Path

    import lindos

    rules = str(Path(__file__).parents[1] / "rules" / "gpt2.toml") if kind == "gpt2" else None
    one = ranks.run(jobs.dropped, 1, lindos.DDP(), kind, options)[0]
    without = ranks.run(jobs.dropped, 1, lindos.DDP(), kind, {})[0]
    assert one[0] != pytest.approx(without[0], abs=1e-6)
    for size, plugin in (
        (2, lindos.DDP()),
        (2, lindos.HybridParallel(tp=2, rules=rules)),
        (4, lindos.HybridParallel(tp=2, rules=rules)),
    ):
        for mine in ranks.run(jobs.dropped, size, plugin, kind, options):
            assert mine == pytest.approx(one, abs=1e-12)


@pytest.mark.parametrize("plan", ["one", "dp2", "tp2"])
def test_bf16_follows_fp32(on, plan):
    losses, text, dtypes = on(jobs.bf16_curve, plan, "bf16")[0]
    true = on(jobs.bf16_curve, "one", "fp32")[0][0]
    assert losses == pytest.approx(true, rel=0.02)
    assert losses[-1] < losses[0]
    assert dtypes == {"torch.bfloat16"}
    assert "computed in bfloat16, stored, reduced and stepped in float32" in text
