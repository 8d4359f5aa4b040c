"""`prove` says equal for encoders, image models, and models with an encoder and a decoder, at dp=2."""

import pytest
import torch

import lindos
from lindos.core.errors import InputError
from lindos.hf import models
from lindos.hf.kinds import kind_of_type
from lindos.hf.twin import batch, twin
from lindos.proof.reference import reference

CASES = [
    ("bert", "masked"),
    ("vit", None),
    ("roberta", "sequence"),
    ("bert", "token"),
    ("t5", None),
    ("whisper", "conditional"),
]
MORE = [
    ("distilbert", "masked"),
    ("electra", "masked"),
    ("flaubert", "masked"),
    ("deit", "image"),
    ("bart", "conditional"),
    ("mbart", "conditional"),
    ("pegasus", "conditional"),
]


@pytest.mark.parametrize(("model_type", "kind"), CASES)
def test_equal(ranks, model_type, kind):
    report = lindos.prove(type=model_type, kind=kind, dp=2, micro_batches=2, steps=2, ranks=ranks)
    assert report.verdict == "equal", report.text()
    assert len(report.runs) == 4


@pytest.mark.parametrize(
    ("model_type", "kind", "meant"),
    [
        ("llama", None, "causal"),
        ("bert", None, "causal"),
        ("t5", None, "conditional"),
        ("distilbert", None, "masked"),
        ("vit", None, "image"),
        ("vit", "classification", "image"),
        ("bert", "classification", "sequence"),
    ],
)
def test_kind_that_is_meant(model_type, kind, meant):
    assert kind_of_type(model_type, kind) == meant


def test_a_kind_that_the_type_has_not(ranks):
    with pytest.raises(InputError, match="no image model of type 'llama'"):
        lindos.prove(type="llama", kind="image", ranks=ranks)
    with pytest.raises(InputError, match="did you mean 'masked'"):
        lindos.prove(type="bert", kind="maskd", ranks=ranks)


@pytest.mark.parametrize(("model_type", "kind"), [("bart", "masked"), ("xlm", None), ("prophetnet", "conditional")])
def test_models_whose_loss_is_another_are_refused(ranks, model_type, kind):
    report = lindos.prove(type=model_type, kind=kind, dp=2, ranks=ranks)
    assert report.verdict == "refused"
    assert "its l" in report.reason or "several tokens" in report.reason


@pytest.mark.parametrize("fault", ["sum for mean", "norm per replica"])
def test_faults_are_found_in_them_too(ranks, fault):
    report = lindos.prove(type="t5", dp=2, steps=2, max_norm=0.5, fault=fault, ranks=ranks)
    assert report.verdict == "differs"
    assert report.reason.startswith(fault)


def _is_own_loss(model, kind):
    """The reference's loss of one step is transformers' own, of which it shares only the forward."""
    data = batch(model.config, rows=4, length=13, seed=3, kind=kind)
    data = {name: value.double() if value.is_floating_point() else value for name, value in data.items()}
    with torch.no_grad():
        own = model(**data).loss
    mine = reference(model, [data], lambda p: torch.optim.SGD(p, lr=0.1), precise=False, kind=kind)
    assert mine.losses[0] == pytest.approx(float(own), rel=1e-6)


@pytest.mark.parametrize(("model_type", "kind"), [*((t, kind_of_type(t, k)) for t, k in CASES), *MORE])
def test_the_reference_takes_the_models_own_loss(model_type, kind):
    model = twin(model_type, seed=2, kind=kind)
    assert models.kind_of(model) in (kind, "classification")
    _is_own_loss(model, kind)
