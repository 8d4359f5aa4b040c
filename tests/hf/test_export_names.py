"""Exports and loads of types whose tensors stand otherwise on disk: several as one, or under the other tied name."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import lindos
from lindos.hf.twin import twin


def written(world, model_type, folder):
    torch.set_num_threads(1)
    booster = lindos.Booster(lindos.HybridParallel(tp=world.size))
    booster.boost(twin(model_type, seed=1, dtype=torch.float32))
    booster.export(folder)


def read_again(world, folder):
    torch.set_num_threads(1)
    model = lindos.from_pretrained(folder)
    booster = lindos.Booster(lindos.HybridParallel(tp=world.size))
    booster.boost(model)
    return {name: booster.full(name) for name, _ in model.named_parameters()}


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as opened:
        return set(opened.keys())


@pytest.mark.parametrize("model_type", ["hrm_text", "lara_mini", "sarvam_moe", "camembert"])
def test_names_are_those_of_transformers_and_every_plan_reads_them(ranks, tmp_path, model_type):
    model = twin(model_type, seed=1, dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    ranks.run(written, 2, model_type, str(tmp_path / "ours"))
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    again = type(model).from_pretrained(tmp_path / "ours", dtype=torch.float32).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    for folder in ("ours", "theirs"):
        full = ranks.run(read_again, 2, str(tmp_path / folder))[0]
        for name, value in model.named_parameters():
            assert torch.equal(full[name], value.detach()), name
