"""Checkpoints: any plan loads any other, complete or absent, damage is named."""

import itertools
import json
import random
import shutil
from pathlib import Path

import checkpoint_jobs as jobs
import pytest
import torch

from lindos.checkpoint.load import manifest_of
from lindos.core.errors import CheckpointError

SHARDED = [("zero1", "zero1"), ("zero1", "one"), ("dp2xtp2", "zero1"), ("zero1", "zero2xtp2"),
           ("zero2xtp2", "zero2xtp2"), ("zero2xtp2", "tp4"), ("one", "zero2xtp2")]  # fmt: skip
BEFORE, AFTER = 3, 4  # five steps an epoch: the steps after cross into the next one


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    made = {}
    for dtype in (torch.float64, torch.float32):
        for name, (size, plugin) in (jobs.PLANS | jobs.ZERO).items():
            path = folder / f"{name}-{dtype.itemsize}"
            made[name, dtype] = path, ranks.run(jobs.start_and_save, size, plugin, str(path), dtype, BEFORE, AFTER)
    return made


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("source", "to"), [*itertools.product(jobs.PLANS, jobs.PLANS), *SHARDED])
def test_any_plan_loads_any_other(ranks, saved, source, to, dtype):
    path, before = saved[source, dtype]
    size, plugin = (jobs.PLANS | jobs.ZERO)[to]
    results = ranks.run(jobs.load_and_go_on, size, plugin, str(path), dtype, AFTER)
    tolerance = 1e-11 if dtype == torch.float64 else 1e-6
    one = saved["one", dtype][1][0]
    for mine in results:
        assert mine["losses"] == pytest.approx(before[0]["losses"], abs=tolerance)
    joined = _joined([mine["numbers"] for mine in results], size, to)
    assert joined == _joined([one["numbers"]], 1, "one")
    if source == to:
        for mine, never_stopped in zip(results, before):
            assert mine["losses"] == never_stopped["losses"]
            assert all(torch.equal(mine["weights"][n], w) for n, w in never_stopped["weights"].items())


def _joined(numbers, size, plan):
    """Rows of each step over dp ranks, in order."""
    tp = {"tp2": 2, "tp4": 4, "dp2xtp2": 2, "zero2xtp2": 2}.get(plan, 1)
    return [[n for row in rows for n in row] for rows in zip(*numbers[::tp])]


def test_weights_only_leaves_the_optimizer(ranks, saved):
    path, _ = saved["tp2", torch.float64]
    size, plugin = jobs.PLANS["dp2"]
    a = ranks.run(jobs.only_load, size, plugin, str(path), "llama", True)
    b = ranks.run(jobs.only_load, size, plugin, str(path), "llama", False)
    assert a == b


def test_files_hold_no_pickle_and_each_element_once(saved):
    path, _ = saved["dp2xtp2", torch.float64]
    names = sorted(p.name for p in path.iterdir())
    assert names == ["manifest.json", *(f"rank-{r:05d}.safetensors" for r in range(4))]
    manifest = manifest_of(path)
    for facts in manifest["tensors"].values():
        count = sum(torch.Size([b - a for a, b in box["box"]]).numel() for box in facts["boxes"])
        assert count == torch.Size(facts["shape"]).numel()
    assert manifest["step"] == BEFORE
    assert manifest["loader"]["rows"] == 8 * BEFORE


def test_a_path_that_exists_is_an_error_and_stays(ranks, saved):
    path, _ = saved["one", torch.float64]
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    with pytest.raises(CheckpointError, match="exists"):
        ranks.run(jobs.start_and_save, 2, jobs.PLANS["tp2"][1], str(path), torch.float64, 0, 0)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before


def _copied(saved, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(saved["tp2", torch.float64][0], path)
    return path


def test_a_flipped_byte_is_named(ranks, saved, tmp_path):
    path = _copied(saved, tmp_path)
    file = path / "rank-00001.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-100] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors: the bytes of .* are damaged"):
        ranks.run(jobs.only_load, 2, jobs.PLANS["dp2"][1], str(path))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "manifest.json").unlink(), "no complete checkpoint"),
        (lambda path: (path / "manifest.json").write_text((path / "manifest.json").read_text()[:500]), "truncated"),
        (
            lambda path: (path / "rank-00000.safetensors").write_bytes(
                (path / "rank-00000.safetensors").read_bytes()[:5000]
            ),
            "truncated",
        ),
        (lambda path: (path / "rank-00001.safetensors").unlink(), "rank-00001.safetensors is missing"),
        (lambda path: shutil.rmtree(path), "there is no checkpoint"),
    ],
)
def test_a_truncated_checkpoint_is_named(ranks, saved, tmp_path, damage, words):
    path = _copied(saved, tmp_path)
    damage(path)
    results = ranks.run(jobs.only_load, 2, jobs.PLANS["dp2"][1], str(path), raises=False)
    assert all(isinstance(error, CheckpointError) and words in str(error) for error in results), results


def test_a_foreign_checkpoint_names_the_first_tensor(ranks, saved):
    path, _ = saved["one", torch.float64]
    with pytest.raises(CheckpointError, match=r"q_norm"):
        ranks.run(jobs.only_load, 1, jobs.PLANS["one"][1], str(path), "qwen3", True)


@pytest.mark.parametrize("job", [jobs.save_without_room, jobs.export_without_room])
def test_a_full_disk_is_named_and_nothing_is_published(ranks, tmp_path, job):
    results = ranks.run(job, 2, jobs.PLANS["tp2"][1], str(tmp_path / "full"), raises=False)
    for error in results:
        assert isinstance(error, CheckpointError), error
        assert "errno 27" in str(error)  # EFBIG stands for ENOSPC, which needs a file system of its own
        assert "bytes" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_found_before_writing(tmp_path, monkeypatch):
    from lindos.checkpoint.save import _check_room

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(CheckpointError, match=r"10 B free; this rank writes 11 B"):
        _check_room(tmp_path / "x", 11)


def test_killed_at_thirty_moments_of_a_save_the_newest_complete_one_loads(ranks, tmp_path):
    size, plugin = jobs.PLANS["tp2"]
    draw = random.Random(0)
    folder = tmp_path / "run"
    folder.mkdir()
    for _ in range(30):
        ranks.run(jobs.kill_at, size, plugin, str(folder), 0.25 + draw.random() * 0.25, raises=False, limit_seconds=2)
        newest = sorted(p for p in folder.iterdir() if p.name.startswith("step-"))
        for path in newest:
            manifest_of(path)
        for path in newest[:-1]:
            shutil.rmtree(path)
    assert len(newest) >= 1
    assert ranks.run(jobs.only_load, *jobs.PLANS["dp2"], str(newest[-1]))
    assert ranks.run(jobs.load_and_go_on, size, plugin, str(newest[-1]), torch.float64, 1)


@pytest.mark.parametrize(
    ("kind", "tied"),
    [("llama", False), ("llama", True), ("mixtral", False), ("gemma3_text", True), ("phi3", False), ("gpt2", True)],
)
def test_export_loads_in_transformers_bit_equal(ranks, tmp_path, kind, tied):
    from transformers import AutoModelForCausalLM

    import lindos

    rules = str(Path(__file__).parents[1] / "rules" / "gpt2.toml") if kind == "gpt2" else None
    path = tmp_path / "model"
    whole = ranks.run(jobs.export_it, 2, lindos.HybridParallel(tp=2, rules=rules), str(path), kind, tied, "fp32")[0]
    loaded = AutoModelForCausalLM.from_pretrained(path)
    theirs = dict(loaded.named_parameters())
    assert set(theirs) == set(whole)
    assert all(torch.equal(theirs[name], value) for name, value in whole.items())
    assert loaded.config.vocab_size == 131
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", "pt") as file:
        keys = set(file.keys())
    assert ("lm_head.weight" in keys) == (not tied)
    if kind == "mixtral":
        assert any(".experts.0.w1.weight" in key for key in keys)


def test_export_in_bf16_says_so(ranks, tmp_path):
    path = tmp_path / "model"
    ranks.run(jobs.export_it, 2, jobs.PLANS["tp2"][1], str(path), "llama", False, "bf16")
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
