"""The reference agrees with finite differences and with itself however a batch is cut; Double lets no fp32 through."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lindos.core.errors import InputError, NumbersError, RefusedError
from lindos.hf.twin import batch, twin
from lindos.proof.double import Double
from lindos.proof.reference import reference

torch.set_num_threads(1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def rows(data, start, stop):
    return {name: value[start:stop] for name, value in data.items()}


def distance(a, b):
    """Largest relative difference over the tensors of two gradients, on the scale of the whole gradient."""
    scale = torch.nn.utils.get_total_norm(list(a.values()))
    return max(((a[name] - b[name]).norm() / scale).item() for name in a)


class Recorder(TorchDispatchMode):
    """Names of the operators that made an fp32 tensor. Entered outside Double, it sees what Double lets through."""

    def __init__(self):
        super().__init__()
        self.single = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.dtype is torch.float32 for x in tree_leaves(out)):
            self.single.append(str(func))
        return out


def test_finite_differences():
    model = twin("llama")
    data = batch(model.config, rows=3, length=12, seed=0)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = reference(model, [data], sgd).gradients[0]
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ]
    for name in [*names, "model.norm.weight"]:
        where = gradient[name].abs().flatten().argmax().item()
        losses = []
        for delta in (1e-5, -1e-5):
            model.load_state_dict(start)
            with torch.no_grad():
                model.get_parameter(name).flatten()[where] += delta
            losses.append(reference(model, [data], sgd).losses[0])
        slope = (losses[0] - losses[1]) / 2e-5
        assert gradient[name].flatten()[where].item() == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mixtral"])
def test_shares_equal_the_joined_batch(kind):
    """Noise between two right ways to compute one step, three steps long."""
    config = twin(kind).config
    batches = [batch(config, rows=5, length=16, seed=seed) for seed in range(3)]
    shares = [[rows(data, 2, 5), rows(data, 0, 2)] for data in batches]
    joined, apart = reference(twin(kind), batches, sgd), reference(twin(kind), shares, sgd)
    assert joined.counts == apart.counts
    assert joined.losses == pytest.approx(apart.losses, rel=1e-14)
    assert joined.grad_norms == pytest.approx(apart.grad_norms, rel=1e-13)
    assert distance(joined.gradients[0], apart.gradients[0]) < 5e-15
    for a, b in zip(joined.weights, apart.weights):
        assert distance(a, b) < 1e-14


def test_shares_may_differ_in_length():
    model = twin("llama")
    data = batch(model.config, rows=4, length=16, seed=0)
    data["attention_mask"][2:, 9:] = 0
    data["labels"][2:, 9:] = -100
    shorter = {name: value[2:, :9] for name, value in data.items()}
    joined = reference(model, [data], sgd)
    apart = reference(twin("llama"), [[rows(data, 0, 2), shorter]], sgd)
    assert apart.losses == pytest.approx(joined.losses, rel=1e-12)
    assert distance(apart.gradients[0], joined.gradients[0]) < 1e-12


def test_the_loss_is_that_of_transformers():
    model = twin("gpt2", dtype=torch.float32)
    data = batch(model.config, rows=3, length=12, seed=0)
    theirs = model(**data).loss.item()
    trace = reference(model, [data], sgd)
    assert trace.losses[0] == pytest.approx(theirs, rel=1e-5)
    assert trace.counts[0] == (data["labels"][:, 1:] != -100).sum()


def test_clipping_and_rates():
    model = twin("llama")
    data = batch(model.config, rows=2, length=12, seed=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trace = reference(
        model, [data] * 3, sgd, max_norm=0.01, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5)
    )
    assert trace.lrs == [0.1, 0.05, 0.025]
    whole = torch.nn.utils.get_total_norm(list(trace.gradients[0].values())).item()
    assert trace.grad_norms[0] == pytest.approx(whole)
    assert whole > 0.01
    moved = torch.nn.utils.get_total_norm([before[name] - value for name, value in trace.weights[0].items()])
    assert moved.item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_tied_once_and_unused_zero():
    model = twin("gemma3_text", tied=True)
    model.register_parameter("spare", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))
    data = batch(model.config, rows=2, length=12, seed=0)
    trace = reference(model, [data], lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5))
    assert list(trace.gradients[0]) == [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in trace.gradients[0]
    assert trace.gradients[0]["spare"].count_nonzero() == 0
    torch.testing.assert_close(trace.weights[0]["spare"], torch.full((3,), 0.95, dtype=torch.float64))


def test_refusals():
    model = twin("llama")
    data = batch(model.config, rows=2, length=12, seed=0)
    with pytest.raises(InputError, match="step 0 must have a position"):
        reference(model, [{**data, "labels": torch.full_like(data["labels"], -100)}], sgd)
    with pytest.raises(NumbersError, match="step 1 must be finite"):
        reference(twin("llama"), [data] * 2, lambda p: torch.optim.SGD(p, lr=float("inf")))
    with pytest.raises(RefusedError, match=r"\[rows, length, vocabulary\]"):
        reference(model, [{**data, "logits_to_keep": 1}], sgd)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mixtral"])
def test_double_makes_no_fp32(kind):
    model = twin(kind)
    data = batch(model.config, rows=2, length=16, seed=0)
    data.pop("labels")
    with Recorder() as plain:
        model(**data, use_cache=False)
    assert plain.single, "without Double the model casts to fp32: the test can fail"
    with Recorder() as seen, Double():
        logits = model(**data, use_cache=False).logits
        logits.square().sum().backward()
    assert seen.single == []
    assert logits.dtype is torch.float64
    assert all(p.grad.dtype is torch.float64 for p in model.parameters())


def test_double_on_factories():
    with Double():
        exact = [torch.zeros(2), torch.tensor(0.5), torch.full((2,), 1e300), torch.ones(2, dtype=torch.float32)]
        exact += [torch.arange(3).float(), torch.linspace(0, 1, 3), torch.rand(2).softmax(0, dtype=torch.float32)]
        exact += [torch.arange(3) / 2, torch.arange(3) * 0.5]
        whole = [torch.arange(3), torch.tensor(2), torch.full((2,), 1)]
    assert {x.dtype for x in exact} == {torch.float64}
    assert {x.dtype for x in whole} == {torch.int64}
    assert torch.zeros(2).dtype is torch.float32
