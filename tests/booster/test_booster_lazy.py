"""Lazy models: no memory before the plan is known, the same values under every plan, slices from a folder."""

import booster_jobs as jobs
import pytest
import torch
from safetensors.torch import load_file, save_file

import lindos
from lindos.core.errors import DataError, InputError, RefusedError

OTHERS = [name for name in jobs.PLANS if name != "one"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "mixtral"
    jobs.model_of("mixtral", torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def one(ranks):
    return ranks.run(jobs.lazily, 1, lindos.DDP(), None)[0]


def test_values_come_from_the_models_own_rule(one):
    weights = one["weights"]
    matrices = {name: value for name, value in weights.items() if value.dim() == 2}
    assert len(matrices) > 10
    for name, value in matrices.items():
        assert float(value.std()) == pytest.approx(0.02, rel=0.2), name
    assert all(
        float((value - 1).abs().max()) < 2e-3 for name, value in weights.items() if "norm" in name
    )  # one step of 1e-3
    values = list(matrices.values())
    assert len({round(float(v.sum()), 6) for v in values}) == len(values)  # each module under its own seed


@pytest.mark.parametrize("plan", OTHERS)
def test_values_are_the_same_under_every_plan(ranks, one, plan):
    size, plugin = jobs.PLANS[plan]
    for mine in ranks.run(jobs.lazily, size, plugin, None):
        assert mine["loss"] == pytest.approx(one["loss"], abs=1e-5)
        for name, value in one["weights"].items():
            assert torch.allclose(mine["weights"][name], value, atol=2e-3), name  # one AdamW step of 1e-3 away


@pytest.mark.parametrize("plan", list(jobs.PLANS))
def test_from_pretrained_reads_slices(ranks, folder, plan):
    size, plugin = jobs.PLANS[plan]
    true = dict(jobs.model_of("mixtral", torch.float32).named_parameters())
    for mine in ranks.run(jobs.lazily, size, plugin, str(folder)):
        for name, value in true.items():
            assert torch.allclose(mine["weights"][name], value, atol=2e-3), name


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks tensor 'model.norm.weight'"),
        (lambda t: t.update({"model.extra.weight": torch.zeros(3)}), "holds tensor 'model.extra.weight'"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(7, 64)}), "'lm_head.weight' is [7, 64] on disk"),
    ],
)
def test_a_folder_with_other_tensors_is_named(ranks, tmp_path, damage, words):
    path = tmp_path / "model"
    jobs.model_of("llama", torch.float32).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    damage(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    results = ranks.run(jobs.lazily, 2, lindos.HybridParallel(tp=2), str(path), raises=False)
    assert all(isinstance(error, DataError) and words in str(error) for error in results), results


def test_a_truncated_file_is_named(ranks, tmp_path):
    path = tmp_path / "model"
    jobs.model_of("llama", torch.float32).save_pretrained(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    results = ranks.run(jobs.lazily, 2, lindos.HybridParallel(tp=2), str(path), raises=False)
    assert all(isinstance(error, DataError) and "model.safetensors is truncated" in str(error) for error in results)


def test_plain_modules_are_lazy_too():
    with lindos.lazy():
        layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    assert layer[0].weight.is_meta
    assert not layer[1].running_var.is_meta
    assert float(layer[1].running_var.sum()) == 8


def test_a_buffer_without_a_value_is_an_error():
    class Bad(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.empty(3))

    with pytest.raises(InputError, match="table"), lindos.lazy():
        Bad()


def refused(world):
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(3))

    with lindos.lazy():
        model = Plain()
    lindos.Booster().boost(model)


def test_a_module_without_a_rule_is_refused(ranks):
    with pytest.raises(RefusedError, match="reset_parameters"):
        ranks.run(refused, 1)


def test_an_initialisation_of_its_own_is_refused_and_not_lost():
    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)
            self.apply(self.start)

        def start(self, module: torch.nn.Module) -> None:
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.constant_(module.weight, 7.0)

    with pytest.raises(RefusedError, match=r"test_booster_lazy\.py:.* start"), lindos.lazy():
        Tiny()
