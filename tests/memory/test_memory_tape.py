"""The tape: what it keeps, what runs again, and what it refuses to guess."""

import gc

import pytest
import torch

from lindos.core.errors import NumbersError
from lindos.memory.frame import Frame
from lindos.memory.homes import Homes
from lindos.memory.keep import FULL, SELECTIVE, Policy
from lindos.memory.saved import saved_bytes


def framed(function, x, weights, policy, homes=None):
    """Output of a function run as a block, and its frame."""
    frame = Frame("block", {w.untyped_storage()._cdata for w in weights}, policy, homes, None, {})
    with frame:
        out = function(x, *weights)
    return out, frame


def gradients(function, policy, homes=None):
    torch.manual_seed(0)
    x, w = torch.randn(6, 4, requires_grad=True), torch.nn.Parameter(torch.randn(4, 4))
    if policy == "plain":
        out, frame = function(x, w), None
    else:
        out, frame = framed(function, x, (w,), policy, homes)
    out.sum().backward()
    return x.grad, w.grad, frame


def views(x, w):
    y = (x @ w).view(2, 3, 4).transpose(0, 1)
    return torch.tanh(y[1:]) * y[:2].exp()


def in_place(x, w):
    y = torch.empty(6, 4)
    y[:3] = (x @ w)[:3]
    y[3:] = x[3:].sin()
    y += 1
    return torch.tanh(y.mul_(2)) * y


def random(x, w):
    y = torch.nn.functional.dropout(x @ w, 0.5)
    return torch.tanh(y) * torch.rand(6, 4).exp() * y.cos()


def split(x, w):
    a, b = (x @ w).chunk(2, -1)
    values, indices = torch.softmax(a, -1).topk(1)
    return values * b.gather(1, indices).sigmoid() * torch.linalg.qr(x)[0][:, :1]


@pytest.mark.parametrize(
    "policy", [None, FULL, SELECTIVE, Policy(frozenset(), 200), Policy(frozenset(), 10**6)], ids=str
)
@pytest.mark.parametrize("function", [views, in_place, random, split])
@pytest.mark.parametrize("host", [False, True])
def test_gradients_are_bit_equal(function, policy, host):
    x, w, _ = gradients(function, "plain")
    homes = Homes(torch.device("cpu")) if host else None
    mine_x, mine_w, frame = gradients(function, policy, homes)
    assert torch.equal(x, mine_x)
    assert torch.equal(w, mine_w)
    if policy == FULL and function is not random:
        assert frame.choice.count_bytes == 6 * 4 * 4  # x, and nothing else
    if host:
        assert homes.evicted_bytes == homes.fetched_bytes > 0


def test_what_is_drawn_at_random_is_kept():
    _, _, frame = gradients(lambda x, w: random(torch.tanh(x @ w), w), FULL)
    # tanh's output is computed again, from x; the mask of dropout and torch.rand's numbers cannot be
    assert frame.choice.dropped
    assert frame.choice.count_bytes == frame.all_bytes - 6 * 4 * 4


def test_an_input_that_the_block_overwrites_is_not_computed_from():
    def function(x, w):
        y = x * 1
        state.add_(1)
        return torch.tanh(y * state) * w.sum()

    state = torch.zeros(6, 4)
    x, w, _ = gradients(function, "plain")
    state.zero_()
    mine_x, mine_w, _ = gradients(function, FULL)
    assert torch.equal(x, mine_x)
    assert torch.equal(w, mine_w)


@pytest.mark.parametrize("policy", [None, FULL, SELECTIVE], ids=str)
def test_a_saved_tensor_changed_in_place_is_an_error(policy):
    def inside(x, w):
        y = torch.exp(x @ w)
        z = y * y
        y.add_(1)
        return z

    with pytest.raises(NumbersError, match="block: a tensor that its backward needs was changed in place"):
        gradients(inside, policy)
    x, w = torch.randn(6, 4, requires_grad=True), torch.nn.Parameter(torch.randn(4, 4))
    y = x * 1
    out, _ = framed(lambda y, w: torch.tanh(y @ w) * torch.sigmoid(y), y, (w,), policy)
    y.detach().add_(1)
    with pytest.raises(NumbersError, match="changed in place"):
        out.sum().backward()


def test_a_second_backward_computes_again():
    x, w = torch.randn(6, 4, requires_grad=True), torch.nn.Parameter(torch.randn(4, 4))
    out, _ = framed(views, x, (w,), FULL)
    out.sum().backward(retain_graph=True)
    first = x.grad.clone()
    out.sum().backward()
    assert torch.equal(x.grad, 2 * first)


def test_a_budget_is_filled_and_never_passed():
    _, _, full = gradients(views, FULL)
    for budget in range(full.choice.count_bytes, full.all_bytes + 200, 50):
        _, _, frame = gradients(views, Policy(frozenset(), budget))
        assert frame.choice.count_bytes <= budget
    assert not frame.choice.dropped
    assert frame.choice.count_bytes == frame.all_bytes


def test_nothing_is_left_when_the_graph_is_gone():
    x, w = torch.randn(6, 4, requires_grad=True), torch.nn.Parameter(torch.randn(4, 4))
    with saved_bytes([w]) as counted:
        out, frame = framed(views, x, (w,), SELECTIVE)
        assert counted.device_bytes == frame.choice.count_bytes > 6 * 4 * 4
        del out, frame, x
        gc.collect()
        assert counted.device_bytes == 0


def test_a_counter_counts_storages_once_and_no_parameters():
    x, w = torch.ones(8, 4, requires_grad=True), torch.nn.Parameter(torch.ones(4, 4))
    with saved_bytes([w]) as counted:
        y = x @ w  # x and w
        z = y.view(32).exp() * y.view(4, 8).t().reshape(32)  # exp's output, and a copy of y
    assert counted.device_bytes == 3 * 8 * 4 * 4
    assert z.shape == (32,)
