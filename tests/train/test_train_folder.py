"""The folder of a run, its checkpoints and its metrics."""

from __future__ import annotations

import json

import pytest
import torch

from lindos.core.errors import CheckpointError, InputError
from lindos.train import folder, metrics


def _checkpoint(run, step, text=None):
    path = folder.checkpoint(run, step)
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"step": step}) if text is None else text)
    return path


def test_a_folder_with_something_in_it_needs_resume(tmp_path):
    folder.prepare(tmp_path / "new" / "run", "never")
    (tmp_path / "new" / "x").write_text("")
    with pytest.raises(InputError, match="must be new or empty"):
        folder.prepare(tmp_path / "new", "never")
    folder.prepare(tmp_path / "new", "auto")
    with pytest.raises(InputError, match="no such folder"):
        folder.prepare(tmp_path / "new", str(tmp_path / "nothing"))


def test_auto_picks_the_newest_complete_and_says_why_others_are_passed_over(tmp_path):
    for step in (5, 40):
        _checkpoint(tmp_path, step)
    _checkpoint(tmp_path, 50, "{")
    folder.checkpoint(tmp_path, 60).mkdir()
    (tmp_path / ".step-70.partial").mkdir()
    found, passed = folder.candidates(tmp_path, "auto")
    assert [step for step, _ in found] == [40, 5]
    assert len(passed) == 2
    assert "step-60" in passed[0]
    assert "incomplete" in passed[0]
    assert "step-50" in passed[1]
    assert folder.candidates(tmp_path, "never") == ([], [])
    assert folder.candidates(tmp_path, str(tmp_path / "step-5"))[0][0][0] == 5
    with pytest.raises(CheckpointError, match="step-60"):
        folder.candidates(tmp_path, str(tmp_path / "step-60"))


def test_old_checkpoints_are_dropped(tmp_path):
    for step in (1, 2, 10):
        _checkpoint(tmp_path, step)
    folder.drop_old(tmp_path, 0)
    assert len(list(tmp_path.iterdir())) == 3
    folder.drop_old(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-2"]


def test_what_stands_in_the_way_is_set_aside(tmp_path):
    for _ in range(2):
        folder.set_aside(_checkpoint(tmp_path, 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3.damaged", "step-3.damaged.1"]


def test_a_resumed_run_must_share_its_facts(tmp_path):
    folder.compare(tmp_path, {"corpus": "a"}, resumed=False)
    folder.compare(tmp_path, {"corpus": "a"}, resumed=True)
    with pytest.raises(InputError, match="must keep corpus: it was a, got b"):
        folder.compare(tmp_path, {"corpus": "b"}, resumed=True)


def test_metrics_drop_what_a_resumed_run_repeats(tmp_path):
    first = metrics.Metrics(tmp_path, True)
    first.open({"header": "x"}, 0)
    for step in range(1, 5):
        first.add(step=step, loss=float(step))
    first.close()
    with first.file.open("a") as stream:
        stream.write('{"step": 5, "lo')
    again = metrics.Metrics(tmp_path, True)
    again.open({"header": "y"}, 2)
    again.add(step=3, loss=float("nan"))
    again.close()
    lines = metrics.read(again.file)
    assert [line.get("step") for line in lines] == [None, 1, 2, 3]
    assert lines[0]["header"] == "y"
    assert lines[-1]["loss"] == "nan"
    silent = metrics.Metrics(tmp_path / "none", False)
    silent.open({}, 0)
    silent.add(step=1)
    silent.close()


def test_flops_of_a_token_and_a_measured_peak():
    assert metrics.flops_per_token(7_000_000_000, 32, 4096, 2048) == 6 * 7e9 + 12 * 32 * 4096 * 2048
    flops, source = metrics.peak_flops(torch.device("cpu"), "fp32")
    assert flops > 1e8
    assert "measured" in source
