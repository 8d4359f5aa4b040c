"""The pieces of tensor parallelism: what crosses a border, its adjoint, the loss over a cut vocabulary, heads."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lindos.comm.ranks import fake, single, threads
from lindos.comm.record import record
from lindos.core.errors import LayoutError
from lindos.core.mesh import Mesh
from lindos.parallel.tensor import ops
from lindos.parallel.tensor.roles import Heads, near_even
from lindos.parallel.tensor.vocabulary import cross_entropy


def on_tp(world):
    return world.on(Mesh.of(pp=1, dp=1, sp=1, tp=world.size))


def adjoints(world):
    """<op(x), y> summed over ranks equals <x, op'(y)> summed over ranks, for each pair."""
    world = on_tp(world)
    draw = torch.Generator().manual_seed(world.rank)
    found = {}
    for name, op in (
        ("copy", lambda x: ops.copy(x, world, "tp", "a")),
        ("gather", lambda x: ops.gather(x, world, "tp", -1, "b", partial=True)),
    ):
        x = torch.randn(3, 4, dtype=torch.float64, generator=draw)
        if name == "copy":
            x = world.broadcast(x, "tp", 0, "same")
        x.requires_grad_()
        out = op(x)
        y = torch.randn(out.shape, dtype=torch.float64, generator=draw)
        (out * y).sum().backward()
        left = world.all_reduce((out.detach() * y).sum().reshape(1), "tp", "left")
        right = (x.detach() * x.grad).sum().reshape(1)
        right = right if name == "copy" else world.all_reduce(right, "tp", "right")
        found[name] = (float(left), float(right))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_backward_is_the_adjoint(size):
    for found in threads(adjoints, size):
        for name, (left, right) in found.items():
            assert left == pytest.approx(right, abs=1e-12), name


def one_copy_for_all(world):
    world = on_tp(world)
    shared = ops.Shared(world, "tp")
    x = torch.ones(2, 3, requires_grad=True)
    with record() as seen:
        q, k, v = (shared.enter(x, name) * (i + 1) for i, name in enumerate("qkv"))
        (q + k + v).sum().backward()
    other = torch.ones(2, 3, requires_grad=True)
    assert shared.enter(other, "q") is not shared.enter(x, "q")
    with torch.no_grad():
        assert shared.enter(x, "q") is x
    return len(seen.calls), x.grad


def test_q_k_and_v_share_one_sum_of_gradients():
    for calls, gradient in threads(one_copy_for_all, 2):
        assert calls == 1
        assert torch.equal(gradient, torch.full((2, 3), 12.0))


def parts_of_loss(world, vocabulary, dtype):
    world = on_tp(world)
    draw = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(2, 7, vocabulary, dtype=torch.float64, generator=draw)
    labels = torch.randint(vocabulary, (2, 7), generator=draw)
    labels[0, :3] = -100
    width = -(-vocabulary // world.size)
    padded = F.pad(logits, (0, width * world.size - vocabulary), value=1e3)  # padding must not matter
    mine = padded[..., world.rank * width : (world.rank + 1) * width].to(dtype).requires_grad_()
    losses = cross_entropy(mine, labels, world, "tp", vocabulary)
    (losses * torch.arange(1.0, 15, dtype=losses.dtype).view(2, 7)).sum().backward()
    whole = logits.to(dtype).double().requires_grad_()
    true = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none").view(2, 7)
    (true * torch.arange(1.0, 15, dtype=true.dtype).view(2, 7)).sum().backward()
    theirs = F.pad(whole.grad, (0, width * world.size - vocabulary))[..., world.rank * width : (world.rank + 1) * width]
    return losses.detach(), true.detach(), mine.grad, theirs


@pytest.mark.parametrize("vocabulary", [8, 11, 131])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.2)])
def test_loss_over_a_cut_vocabulary(size, vocabulary, dtype, tolerance):
    for losses, true, gradient, theirs in threads(parts_of_loss, size, vocabulary, dtype):
        assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.allclose(losses.double(), true, atol=tolerance)
        assert torch.allclose(gradient.double(), theirs, atol=tolerance)


def test_no_wide_copy_of_the_logits_is_ever_whole():
    """The largest fp32 tensor made between the logits and the loss is a chunk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                self.elements = max(self.elements, out.untyped_storage().nbytes() // 4)
            return out

    logits = torch.randn(4096, 2048).bfloat16().requires_grad_()
    with Largest() as seen:
        cross_entropy(logits, torch.randint(2048, (4096,)), single(), "dp", 2048).sum().backward()
    assert seen.elements <= (1 << 19) + 2048 < logits.numel() // 8


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_heads_are_all_held_and_meet_their_kv_heads(kv, ratio, size, parts):
    try:
        heads = Heads(kv * ratio, kv, parts)
    except LayoutError:
        return
    counts, start = heads.counts(), 0
    assert sum(counts) == kv * ratio
    assert min(counts) >= 1
    for rank, count in enumerate(counts):
        (a, b), *rest = heads.pieces("key_value", kv * size)[rank]
        assert not rest
        local = heads.local_ratio(rank)
        for i in range(count):  # the kv head that attention pairs with local query head i is the right one
            assert a // size + i // local == (start + i) // ratio
        assert (b - a) // size * local == count
        start += count


def test_heads_that_cannot_be_cut_name_what_can():
    with pytest.raises(LayoutError, match=r"Use tp in \[1, 2, 3, 6\]"):
        Heads(6, 3, 4)


@given(st.integers(0, 1000), st.integers(1, 64))
def test_near_even(count, parts):
    counts = near_even(count, parts)
    assert sum(counts) == count
    assert max(counts) - min(counts) <= 1


def test_bytes_of_a_large_world_without_it():
    world = fake(64, pp=1, dp=8, sp=1, tp=8)
    with record() as seen:
        ops.total(torch.ones(16, 32), world, "tp", "x")
    assert seen.received_bytes("tp") == 2 * 7 / 8 * 16 * 32 * 4
