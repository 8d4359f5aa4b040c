"""Warm-up and cosine."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lindos.core.errors import InputError
from lindos.train.config import Optim
from lindos.train.schedule import WarmupCosine, factor, warmup_steps


def _optimizer(lr=2.0):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def test_rises_then_falls():
    rates = [factor(step, 100, 10, 0.1) for step in range(120)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert rates[100:] == [0.1] * 20
    assert rates[55] == pytest.approx(0.55)  # half way along the cosine


@given(st.integers(1, 50), st.integers(0, 50), st.floats(0, 1))
def test_stays_within_the_peak(total, warmup, last):
    for step in range(total + 2):
        assert 0 <= factor(step, total, min(warmup, total), last) <= 1 + 1e-12


def test_sets_each_groups_own_peak_and_resumes_from_json():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": parameters[:1], "lr": 1.0}, {"params": parameters[1:], "lr": 3.0}]
    schedule = WarmupCosine(torch.optim.SGD(groups, lr=1.0), 10, 2, 0.0)
    assert schedule.get_last_lr() == [0.5, 1.5]
    for _ in range(4):
        schedule.step()
    state = json.loads(json.dumps(schedule.state_dict()))
    again = WarmupCosine(_optimizer(), 10, 2, 0.0)
    again.load_state_dict(state)
    assert again.get_last_lr()[0] == pytest.approx(2 * schedule.get_last_lr()[0])


def test_warmup_is_a_share_or_steps():
    assert warmup_steps(Optim(warmup_share=0.05), 1000) == 50
    assert warmup_steps(Optim(warmup_steps=7), 1000) == 7
    with pytest.raises(InputError, match="at most the 5 steps"):
        warmup_steps(Optim(warmup_steps=7), 5)
