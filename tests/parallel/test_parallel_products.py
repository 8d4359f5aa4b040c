"""A bf16 product through fp32 is torch's bf16 product up to the order of its sums."""

import pytest
import torch

from lindos.parallel import products


@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16)])
@pytest.mark.parametrize("biased", [True, False])
def test_equal_to_torch(monkeypatch, shape, biased):
    monkeypatch.setattr(products, "emulated", lambda: True)
    layer = torch.nn.Linear(16, 8, bias=biased).bfloat16()
    x = torch.randn(shape).bfloat16().requires_grad_()
    other = x.detach().clone().requires_grad_()
    y = products.linear_forward(layer, x)
    y.square().sum().backward()
    mine = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    true = layer(other)
    true.square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), true.float(), rtol=0.01, atol=0.01)
    assert torch.allclose(x.grad.float(), other.grad.float(), rtol=0.02, atol=0.05)
    for name, parameter in layer.named_parameters():
        assert torch.allclose(mine[name].float(), parameter.grad.float(), rtol=0.02, atol=0.1)


def test_other_dtypes_go_straight(monkeypatch):
    monkeypatch.setattr(products, "emulated", lambda: True)
    layer = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4)
    assert torch.equal(products.linear_forward(layer, x), layer(x))


def test_subclasses_with_a_forward_of_their_own_are_left_alone(monkeypatch):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Doubled(4, 4))
    products.install(model)
    assert "forward" in model[0].__dict__
    assert "forward" not in model[1].__dict__
