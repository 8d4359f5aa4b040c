"""Cases that are easily taken for granted: each was wrong once."""

import pytest
import torch

import lindos
from lindos.booster.loader import over_dp
from lindos.comm import launch
from lindos.comm.ranks import single
from lindos.core.errors import InputError, RefusedError
from lindos.hf.twin import batch, twin, twin_config


@pytest.fixture(autouse=True)
def alone():
    launch.enter(single())
    yield
    launch.enter(None)


def made(kind="llama", dtype=torch.float64, **options):
    model = twin(kind, seed=1, dtype=dtype)
    booster = lindos.Booster(**options)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer, batch(model.config, 4, 10, seed=0)


def test_frozen_parameters_may_be_in_the_optimizer():
    model = twin("llama", seed=1)
    model.model.embed_tokens.weight.requires_grad_(False)
    before = model.model.embed_tokens.weight.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    booster = lindos.Booster()
    model, *_ = booster.boost(model, optimizer)
    booster.step(batch(model.config, 4, 10, seed=0))
    assert torch.equal(booster.full("model.embed_tokens.weight"), before)
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters())) - 1


def test_parameters_in_no_group_get_no_gradient_and_no_state():
    model = twin("llama", seed=1)
    optimizer = torch.optim.AdamW(model.model.layers.parameters(), lr=0.1)
    before = model.lm_head.weight.clone()
    booster = lindos.Booster()
    model, *_ = booster.boost(model, optimizer)
    booster.step(batch(model.config, 4, 10, seed=0))
    assert torch.equal(booster.full("lm_head.weight"), before)
    assert len(optimizer.state) == len(list(model.model.layers.parameters()))
    with pytest.raises(InputError, match="not trained"):
        booster.gradient("lm_head.weight")


def test_frozen_parameters_keep_their_bits_under_bf16():
    model = twin("llama", seed=1, dtype=torch.float32)
    model.lm_head.weight.requires_grad_(False)
    before = model.lm_head.weight.clone()
    booster = lindos.Booster(precision="bf16")
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(booster.full("lm_head.weight"), before)


def test_two_backwards_with_last_add_up():
    booster, model, _, rows = made()
    first, second = ({name: value[i : i + 2] for name, value in rows.items()} for i in (0, 2))
    for part in (first, second):
        booster.backward(model(**part).loss)
    twice = booster.gradient("model.norm.weight")
    booster, model, _, _ = made()
    booster.backward(model(**first).loss, last=False)
    booster.backward(model(**second).loss)
    assert torch.allclose(twice, booster.gradient("model.norm.weight"), rtol=1e-12)


def test_buffers_of_a_folder_are_read(tmp_path):
    model = twin("deepseek_v3", seed=1, dtype=torch.float32)
    name = next(n for n, _ in model.named_buffers() if n.endswith("e_score_correction_bias"))
    model.get_buffer(name).fill_(3.0)
    model.save_pretrained(tmp_path / "model")
    booster = lindos.Booster()
    read, *_ = booster.boost(lindos.from_pretrained(tmp_path / "model"))
    assert torch.equal(read.get_buffer(name), torch.full_like(read.get_buffer(name), 3.0))


@pytest.mark.parametrize("labels", ["three-dimensional", "one"])
def test_classification_is_transformers_own_loss(labels):
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    config = twin_config("qwen2")
    config.num_labels, config.pad_token_id, config.classifier_dropout = 10, 0, 0.0
    kind = AutoModelForSequenceClassification if labels == "one" else AutoModelForTokenClassification
    torch.manual_seed(0)
    model = kind.from_config(config).double().train()
    rows = batch(config, 4, 10, seed=0, ragged=False)
    draw = torch.Generator().manual_seed(0)
    rows["labels"] = torch.randint(10, (4,) if labels == "one" else (4, 10), generator=draw)
    true = float(model(**rows).loss.detach())
    booster = lindos.Booster()
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert booster.step(rows).loss == pytest.approx(true, rel=1e-6)


def test_other_losses_are_refused_by_name():
    from transformers import AutoModelForSequenceClassification

    config = twin_config("qwen2")
    config.num_labels, config.problem_type = 3, "multi_label_classification"
    model = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(RefusedError, match="multi label"):
        lindos.Booster().boost(model)


@pytest.mark.parametrize(("name", "value"), [("labels", -1), ("labels", 10_000), ("input_ids", 10_000)])
def test_numbers_outside_the_vocabulary_are_errors(name, value):
    booster, _, _, rows = made()
    rows[name][0, 3] = value
    with pytest.raises(InputError, match=name):
        booster.step(rows)
    rows[name][0, 3] = 5
    booster.step(rows)  # nothing was left behind


def test_one_row_is_a_row():
    booster, _, _, rows = made(micro_batches=2)
    with pytest.raises(InputError, match="micro_batches=2"):
        booster.step({name: value[:1] for name, value in rows.items()})


def test_batch_norm_is_refused_when_it_comes_to_train():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(x)

    def loss(outputs, _):
        return outputs.sum(), 1

    model = Model()
    booster = lindos.Booster(loss=loss)
    model.norm.eval()
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.step({"x": torch.randn(4, 3)})
    assert not model.norm.training  # a part that rests stays at rest
    whole = Model().eval()
    booster = lindos.Booster(loss=loss)
    booster.boost(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    with pytest.raises(RefusedError, match="BatchNorm"):
        booster.step({"x": torch.randn(4, 3)})


def test_fillers_leave_a_shared_tensor_alone():
    def collate(rows):
        ids = torch.stack(rows)
        return {"input_ids": ids, "labels": ids}

    loader = torch.utils.data.DataLoader([torch.full((4,), i) for i in range(3)], batch_size=2, collate_fn=collate)
    *_, last = over_dp(loader, 0, 1, 0)
    assert last["labels"][1].tolist() == [-100] * 4
    assert last["input_ids"].min() >= 0


def test_a_sampler_with_replacement_is_an_error():
    data = list(range(4))
    sampler = torch.utils.data.RandomSampler(data, replacement=True, num_samples=9)
    with pytest.raises(InputError, match="replacement"):
        over_dp(torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler), 0, 1, 0)


def test_a_fractional_count_and_metrics_in_any_order():
    def loss(outputs, rows):
        return outputs.logits.square().sum(), 2.5, {"b": (1.0, 2.0), "a": (3.0, 4.0)}

    booster, _, _, rows = made(loss=loss)
    rows.pop("labels")
    result = booster.step(rows)
    assert result.count == 2.5
    assert result.metrics == {"a": 0.75, "b": 0.5}


def test_labels_with_a_loss_of_your_own_are_refused_in_a_call():
    booster, model, _, rows = made(loss=lambda outputs, _: (outputs.logits.sum(), 1))
    with pytest.raises(InputError, match="without labels"):
        model(**rows)
    assert booster.mesh.size("dp") == 1


def test_options_of_the_model_may_be_given_in_a_call():
    _, model, _, rows = made()
    assert torch.isfinite(model(**rows, use_cache=False).loss)


def test_errors_are_public():
    assert lindos.errors.InputError is InputError


@pytest.mark.parametrize("options", [{"disk": "/x"}, {"host_fraction": 0.5}, {"device_budget": "1GiB"}])
def test_no_option_is_accepted_and_ignored(options):
    with pytest.raises(RefusedError):
        lindos.Booster(lindos.DDP(**options))


def test_dropout_differs_between_calls_of_one_step():
    config = twin_config("llama")
    config.attention_dropout = 0.5
    model = twin(config, seed=1)
    booster = lindos.Booster()
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = batch(model.config, 4, 10, seed=0)
    assert float(model(**rows).loss.detach()) != float(model(**rows).loss.detach())


@pytest.mark.parametrize("module", [torch.nn.Dropout2d(0.1), torch.nn.MultiheadAttention(4, 2, dropout=0.1)])
def test_randomness_of_its_own_is_refused(module):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), module)
    with pytest.raises(RefusedError, match=r"1 \("):
        lindos.Booster(loss=lambda outputs, _: (outputs.sum(), 1)).boost(model)
