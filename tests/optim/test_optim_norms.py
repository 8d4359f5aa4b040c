"""One norm: each element counted once, whatever is cut, shared, padded or replicated."""

import pytest
import torch

from lindos.comm.ranks import threads
from lindos.core.layout import Cut, Layout, shared
from lindos.core.mesh import Mesh
from lindos.optim.norms import clip_factor, total_norm
from lindos.parallel.whole import take, whole

LAYOUTS = {
    "replicated": Layout((5, 3)),
    "padded": Layout((7, 3), (Cut("tp", 0, 4),)),
    "shared": Layout((8, 3), (Cut("tp", 0, 4, shared(2, 4, 4)),)),
    "flat over dp": Layout((6, 5), (Cut("tp", 1, 4), Cut("dp", "flat", 2))),
}


def norm_and_back(world):
    world = world.on(Mesh.of(dp=2, tp=4))
    draw = torch.Generator().manual_seed(0)
    pairs, square = [], 0.0
    for name, layout in LAYOUTS.items():
        full = torch.randn(layout.shape, dtype=torch.float64, generator=draw)
        local = torch.full(layout.local_shape(world.mesh), 1e6, dtype=torch.float64)
        take(full, layout, world, local)
        assert torch.equal(whole(local, layout, world, name), full)
        pairs.append((layout, local))
        square += float(full.square().sum())
    return float(total_norm(pairs, world)), square**0.5


def test_norm_counts_each_element_once():
    for mine, true in threads(norm_and_back, 8):
        assert mine == pytest.approx(true, rel=1e-14)


def test_clip_factor_is_torchs():
    parameter = torch.nn.Parameter(torch.zeros(3))
    for scale, limit in ((10.0, 1.0), (0.1, 1.0)):
        parameter.grad = torch.full((3,), scale)
        norm = torch.nn.utils.clip_grad_norm_([parameter], limit)
        assert torch.allclose(parameter.grad, scale * clip_factor(norm.double(), limit).float().expand(3))
