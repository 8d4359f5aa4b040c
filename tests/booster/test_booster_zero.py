"""zero_stage 1 and 2: bytes resident and communicated equal the formulas; optimizers are probed."""

import booster_jobs as jobs
import pytest
import torch
from torch import nn

import lindos
from lindos.core.errors import InputError, RefusedError
from lindos.optim.optimizer import check

SIZES = [1, 2, 4, 8]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dp", SIZES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_equal_the_formulas(ranks, stage, dp, precision):
    micros = 3
    for mine in ranks.run(jobs.zero_bytes, dp, lindos.LowLevelZero(stage=stage), precision, micros):
        work, elements = (4 if precision == "fp32" else 2), mine["elements"]
        assert elements <= mine["padded"] <= elements * 1.05 + mine["chunks"] * 16 * dp
        part = mine["padded"] // dp
        assert mine["parameters"] == mine["padded"] * work
        assert mine["masters"] == (0 if precision == "fp32" else part * 4)
        whole = 0 if stage == 2 and dp > 1 else mine["padded"]
        assert mine["gradients"] == 4 * (whole + (part if dp > 1 else 0))
        kept = mine["ledger"]
        assert part - mine["chunks"] * 16 <= kept["moments"] <= part
        assert kept["parameter"] == elements * work
        assert kept["gradient"] == 4 * (elements if stage == 1 or dp == 1 else kept["moments"])
        assert kept["state"] == (0 if precision == "fp32" else 4 * kept["moments"])
        share = (dp - 1) / dp
        expected = {} if dp == 1 else {
            "reduce_scatter": (micros if stage == 2 else 1) * share * mine["padded"] * 4,
            "all_gather": share * mine["padded"] * work,
        }  # fmt: skip
        assert mine["received"] == {op: pytest.approx(count) for op, count in expected.items()}


def test_replicas_reduce_a_part_again(ranks):
    plugin = lindos.LowLevelZero(stage=1, zero_replicas=2)
    for mine in ranks.run(jobs.zero_bytes, 4, plugin, "fp32", 1):
        padded = mine["padded"]
        assert mine["received"] == {
            "reduce_scatter": pytest.approx(padded / 2 * 4),
            "all_reduce": pytest.approx(2 * 0.5 * padded / 2 * 4),
            "all_gather": pytest.approx(padded / 2 * 4),
        }


def test_replicas_that_do_not_divide_are_an_error_that_says_what_does(ranks):
    for message in ranks.run(jobs.refusal, 2, lindos.LowLevelZero(zero_replicas=3), "adamw"):
        assert "InputError: zero_replicas=3 must divide dp=2. Use zero_replicas in [1, 2]" in message


def test_bf16_curve_is_that_of_whole_states(ranks):
    for stage in (1, 2):
        shared = ranks.run(jobs.bf16_curve, 2, lindos.LowLevelZero(stage=stage), "bf16")
        whole = ranks.run(jobs.bf16_curve, 2, lindos.DDP(), "bf16")
        assert shared[0][0] == shared[1][0] == whole[0][0]


def test_a_frozen_table_is_whole_and_has_no_gradient(ranks):
    for shared, whole in zip(*(ranks.run(jobs.frozen, 2, plugin) for plugin in (lindos.LowLevelZero(2), lindos.DDP()))):
        assert shared[0] == pytest.approx(whole[0], abs=1e-12)
        for name, value in whole[1].items():  # the clipping factor sums squares in another order
            assert torch.allclose(shared[1][name], value, rtol=0, atol=1e-12), name
            assert "embed" not in name or torch.equal(shared[1][name], value)


class WholeNorm(torch.optim.Optimizer):
    """Steps by the direction of the whole tensor, as LARS does."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad / p.grad.norm(), alpha=-float(group["lr"]))


def warming(parameters):
    return WholeNorm(parameters, lr=0.0)


ELEMENTWISE = [
    torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
]  # fmt: skip


def _checked(make, shared=True, **options):
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = make([weight], **options)
    before = weight.detach().clone()
    found = check(optimizer, {id(weight): "weight"}, shared)
    assert torch.equal(weight, before)
    assert weight.grad is None
    return found


@pytest.mark.parametrize("make", ELEMENTWISE)
def test_elementwise_optimizers_pass_the_probe(make):
    assert _checked(make) == {"weight"}


@pytest.mark.parametrize("fused", [True, False])
def test_fused_and_momentum_pass_the_probe(fused):
    assert _checked(torch.optim.AdamW, fused=fused, weight_decay=0.1)
    assert _checked(torch.optim.SGD, lr=torch.tensor(0.0), momentum=0.9, nesterov=True)


@pytest.mark.parametrize("make", [WholeNorm, warming, torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS])
def test_others_are_refused_by_name_and_told_what_serves(make):
    with pytest.raises(RefusedError, match=r"is not elementwise: .*zero=0") as error:
        _checked(make)
    assert type(make([nn.Parameter(torch.randn(2, 2))])).__name__ in str(error.value)
    assert _checked(make, shared=False)


def test_a_refused_optimizer_is_refused_on_all_ranks(ranks):
    messages = ranks.run(jobs.refusal, 2, lindos.LowLevelZero(), "adafactor")
    assert all("RefusedError: Adafactor is not elementwise" in message for message in messages)
    assert ranks.run(jobs.refusal, 2, lindos.DDP(), "adafactor") == ["", ""]


def test_a_plain_state_dict_is_still_whole_and_optimizer_state_is_not(ranks):
    assert all(ranks.run(jobs.dictionaries, 2, lindos.LowLevelZero(2)))


def test_stage_3_is_no_stage_of_low_level_zero():
    with pytest.raises(InputError, match="1 or 2; got 3"):
        lindos.LowLevelZero(stage=3)
