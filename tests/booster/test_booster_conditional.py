"""`step` with an encoder and a decoder: the decoder's inputs are what the model makes of its labels."""

import pytest
import torch

import lindos
from lindos.core.errors import InputError
from lindos.hf import models
from lindos.hf.twin import batch, twin

torch.set_num_threads(1)


def _boosted(model_type, dtype=torch.float64, **options):
    model = twin(model_type, seed=1, dtype=dtype, kind="conditional")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    booster = lindos.Booster(**options)
    model, *_ = booster.boost(model, optimizer)
    return model, booster


def _data(model, rows=4):
    made = batch(model.config, rows, 9, seed=4, kind="conditional")
    return {name: value.double() if value.is_floating_point() else value for name, value in made.items()}


@pytest.mark.parametrize("model_type", ["t5", "bart", "mbart", "pegasus", "whisper", "marian"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_loss_is_the_models_own(model_type, micro_batches):
    plain = twin(model_type, seed=1, kind="conditional")
    data = _data(plain)
    own = plain(**data).loss
    own.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    _, booster = _boosted(model_type, micro_batches=micro_batches)
    out = booster.step(data)
    assert out.loss == pytest.approx(float(own.detach()), rel=1e-6)  # the model's own softmax is in fp32 here and there
    assert out.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert out.count == int((data["labels"] != -100).sum())


def test_inputs_of_the_decoder_may_be_given():
    model, booster = _boosted("t5")
    data = _data(model)
    made = models.decoder_inputs(model)(data["labels"])
    expected = booster.step(data).loss
    assert booster.step({**data, "decoder_input_ids": made}).loss == expected
    other = booster.step({**data, "decoder_input_ids": made.roll(1, 1)}).loss
    assert other != pytest.approx(expected, rel=1e-3)


def test_calls_with_and_without_labels():
    model, booster = _boosted("bart")
    data = _data(model)
    out = model(**data)
    assert out.logits is None
    assert float(out.loss.detach()) == pytest.approx(booster.step(data).loss, rel=1e-12)
    assert booster.evaluate([data]).loss == pytest.approx(booster.step(data).loss, rel=1e-12)
    labels = data.pop("labels")
    logits = model(**data, decoder_input_ids=models.decoder_inputs(model)(labels)).logits
    assert logits.shape == (*labels.shape, 131)


def test_a_model_that_makes_no_inputs_says_so(monkeypatch):
    monkeypatch.setattr(models, "decoder_inputs", lambda model: None)
    model, booster = _boosted("t5")
    data = _data(model)
    with pytest.raises(InputError, match="T5ForConditionalGeneration has no method that makes decoder_input_ids"):
        booster.step(data)
    data["decoder_input_ids"] = torch.zeros_like(data["labels"])
    assert booster.step(data).count == int((data["labels"] != -100).sum())


@pytest.mark.parametrize("model_type", ["bart", "whisper", "marian", "xlnet"])
def test_decoders_whose_own_loss_is_not_shifted_are_refused(model_type):
    model = twin(model_type, kind="causal", dtype=torch.float32)
    with pytest.raises(lindos.core.errors.RefusedError, match="labels are not shifted"):
        lindos.Booster().boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_losses_of_routers_are_refused():
    model = twin("switch_transformers", kind="conditional", dtype=torch.float32)
    model.config.output_router_logits = True
    with pytest.raises(lindos.core.errors.RefusedError, match="losses of its routers"):
        lindos.Booster().boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_labels_outside_the_vocabulary_are_errors():
    model, booster = _boosted("t5")
    data = _data(model)
    data["labels"][0, 0] = 131
    with pytest.raises(InputError, match=r"labels must be in 0\.\.130"):
        booster.step(data)


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_other_classifications_stay_refused(problem):
    model = twin("bert", kind="sequence", dtype=torch.float32)
    model.config.problem_type = problem
    with pytest.raises(lindos.core.errors.RefusedError, match=problem.replace("_", " ")):
        lindos.Booster().boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
