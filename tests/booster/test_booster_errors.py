"""Bad input gets a clear error on all ranks, before any work."""

import booster_jobs as jobs
import pytest

import lindos
from lindos.core.errors import InputError, LindosError, NumbersError, RefusedError


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("weights differ", "model.layers.1.mlp.up_proj.weight"),
        ("optimizer of other parameters", "is not a parameter of the model"),
        ("optimizer with state", "already has state"),
        ("options differ", "differ"),
        ("different batches", "different batches"),
        ("fewer rows", "micro_batches=2"),
        ("no valid token", "no rank's batch has a valid position"),
        ("odd shape", "position_ids"),
        ("plain backward", "booster.backward"),
        ("evaluated rows", "must"),
        ("nan", "model.layers.1"),
    ],
)
@pytest.mark.parametrize("plan", ["tp2", "dp2xtp2"])
def test_all_ranks_raise_and_name_it(ranks, case, words, plan):
    size, plugin = jobs.PLANS[plan]
    results = ranks.run(jobs.bad, size, plugin, case, raises=False, limit_seconds=20)
    for rank, error in enumerate(results):
        assert isinstance(error, NumbersError if case == "nan" else LindosError), (rank, error)
        assert words in str(error), (rank, error)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lindos.DDP(tpp=2), "did you mean 'tp'"),
        (lambda: lindos.HybridParallel(tensor="1D"), "did you mean '1d'"),
        (lambda: lindos.HybridParallel(tp=0), "at least 1"),
        (lambda: lindos.LowLevelZero(stage=4), "stage"),
        (lambda: lindos.Booster(precision="fp23"), "did you mean 'fp32'"),
        (lambda: lindos.Booster(max_norm=-1), "max_norm"),
        (lambda: lindos.Booster(micro_batches=0), "micro_batches"),
        (lambda: lindos.Booster(allow=("router_loss",)), "router_aux_loss"),
        (lambda: lindos.Booster(plugin="ddp"), "plugin is one of"),
        (lambda: lindos.HybridParallel(tp=3).mesh(8), "tp in [1, 2, 4, 8]"),
    ],
)
def test_options_are_checked(make, words):
    with pytest.raises(InputError) as error:
        make()
    assert words in str(error.value)


@pytest.mark.parametrize(
    "plugin",
    [
        lindos.Gemini(),
        lindos.HybridParallel(pp=2),
        lindos.HybridParallel(sp=2),
        lindos.HybridParallel(tensor="2d"),
        lindos.HybridParallel(zero=3),
        lindos.HybridParallel(ep=2),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(plugin):
    with pytest.raises(RefusedError) as error:
        lindos.Booster(plugin)
    assert "not served yet" in str(error.value)
