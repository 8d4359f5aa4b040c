"""End to end on two ranks: train, kill, resume, and come to the same numbers."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lindos.train.metrics import read

WORDS = ["the", "a", "cat", "dog", "bird", "tree", "house", "sat", "ran", "on", "under", "red", "blue", "slow"]
SIZES = {
    "data.tokenizer": 300,
    "data.sequence": 16,
    "data.validation_fraction": 0.05,
    "model.hidden": 32,
    "model.layers": 2,
    "model.heads": 4,
    "model.intermediate": 64,
    "train.batch_tokens": 256,
    "train.tokens": 256 * 30,
    "train.save_every": 10,
    "train.evaluate_every": 20,
    "train.log_every": 5,
    "optim.lr": 1e-2,
    "log.sample_tokens": 4,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    chance = random.Random(0)
    for number in range(8):
        lines = (" ".join(chance.choices(WORDS, k=9)) + "." for _ in range(150))
        (folder / f"{number}.txt").write_text("\n".join(lines) + "\n")
    return folder


def _command(run, text, *words, ranks=2, **changed):
    sizes = {**SIZES, **{name.replace("__", "."): value for name, value in changed.items()}}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    nproc = ["--nproc", str(ranks)] if ranks > 1 else []
    return [sys.executable, "-m", "lindos", "pretrain", *nproc, "--data", str(text), "--run", str(run), *flags, *words]


def _pretrain(run, text, *words, code=0, ranks=2, **changed):
    command = _command(run, text, *words, ranks=ranks, **changed)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that nothing interrupted."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    return run, _pretrain(run, text, "--parallel.tp", "2")


def test_a_run_learns_and_leaves_what_it_says(whole):
    run, done = whole
    lines = read(run / "metrics.jsonl")
    head, final = lines[0], lines[-1]
    assert head["flops_per_token"] == 6 * head["parameters"] + 12 * 2 * 32 * 16
    assert "PaLM" in head["formula"]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 31))
    assert set(steps[0]) >= {"loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "seconds"}
    assert steps[-1]["tokens"] == 256 * 30
    assert final["validation_loss"] < final["unigram_entropy"] - 0.3
    assert final["sample"]
    assert "unigram entropy" in done.stdout
    assert done.stdout.count("step 10/30") == 1  # the first rank alone prints
    assert sorted(path.name for path in run.glob("step-*")) == ["step-10", "step-20", "step-30"]
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (run / "model").iterdir()}


def test_other_plans_take_the_same_steps(whole, text, tmp_path):
    run, _ = whole
    _pretrain(tmp_path / "dp", text, train__micro_batches=2)
    _pretrain(tmp_path / "one", text, ranks=1)
    expected = [line["loss"] for line in read(run / "metrics.jsonl") if "loss" in line]
    for other in ("dp", "one"):
        lines = read(tmp_path / other / "metrics.jsonl")
        assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(expected, abs=1e-4)
        assert lines[-1]["validation_loss"] == pytest.approx(
            read(run / "metrics.jsonl")[-1]["validation_loss"], abs=1e-4
        )


def test_a_signal_saves_and_auto_continues_to_the_same_numbers(whole, text, tmp_path):
    run = tmp_path / "run"
    slow = {"train__save_every": 0, "train__tokens": 256 * 30}
    command = _command(run, text, "--parallel.tp", "2", **slow)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    _until(lambda: len(read(run / "metrics.jsonl")) > 3, process)
    process.send_signal(signal.SIGTERM)
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 75, shown
    assert "--resume auto continues" in shown
    saved = [path.name for path in run.glob("step-*")]
    assert len(saved) == 1
    (run / "step-29").mkdir()  # as a kill of another program may leave it
    done = _pretrain(run, text, "--parallel.tp", "2", "--resume", "auto", **slow)
    assert f"continues after step {saved[0].removeprefix('step-')}" in done.stdout
    assert "passed over step-29" in done.stdout
    before, after = read(whole[0] / "metrics.jsonl"), read(run / "metrics.jsonl")
    assert [x["step"] for x in after if "loss" in x] == list(range(1, 31))
    losses = [[x["loss"] for x in lines if "loss" in x] for lines in (before, after)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert after[-1]["validation_loss"] == pytest.approx(before[-1]["validation_loss"], abs=1e-6)


def test_another_plan_continues_a_finished_run(whole, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    done = _pretrain(run, text, "--resume", "auto", train__tokens=256 * 35)
    assert "continues after step 30" in done.stdout
    lines = read(run / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 36))
    assert len([line for line in lines if line.get("final")]) == 1


def test_a_damaged_checkpoint_is_passed_over(whole, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    for file in (run / "step-30").glob("*.safetensors"):
        os.truncate(file, file.stat().st_size // 2)
    done = _pretrain(run, text, "--parallel.tp", "2", "--resume", "auto")
    assert "continues after step 20" in done.stdout
    assert "passed over" in done.stdout
    assert (run / "step-30.damaged").is_dir()
    before, after = read(whole[0] / "metrics.jsonl"), read(run / "metrics.jsonl")
    assert after[-1]["validation_loss"] == pytest.approx(before[-1]["validation_loss"], abs=1e-6)


def test_errors_appear_once_and_keep_their_code(whole, text, tmp_path):
    run, _ = whole
    done = _pretrain(run, text, code=2)
    assert done.stderr.count("must be new or empty") == 1
    done = _pretrain(tmp_path / "a", text, "--parallel.tp", "3", code=2)
    assert done.stderr.count("InputError") == 1
    done = _pretrain(tmp_path / "b", text / "nothing.txt", code=2)
    assert done.stderr.count("every path must exist") == 1
    done = _pretrain(tmp_path / "c", text, "--parallel.tensor", "2d", "--parallel.tp", "2", code=3)
    assert done.stderr.count("RefusedError") == 1
    done = _pretrain(run, text, "--resume", "auto", code=2, train__batch_tokens=512)
    assert "must keep tokens_a_step" in done.stderr
    done = _pretrain(tmp_path / "d", text, code=2, model__heads=5)
    assert done.stderr.count("model.heads must divide model.hidden") == 1


def test_numbers_that_are_not_finite_leave_the_checkpoints(text, tmp_path):
    done = _pretrain(tmp_path / "run", text, code=5, optim__lr=1e30, train__save_every=1, train__evaluate_every=0)
    assert "NumbersError" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run" / "step-1" / "manifest.json").is_file()


def test_export_of_a_checkpoint(whole, tmp_path):
    import torch
    from safetensors.torch import load_file

    run, _ = whole
    command = [sys.executable, "-m", "lindos", "export", str(run / "step-30"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    a, b = (load_file(Path(folder) / "model.safetensors") for folder in (run / "model", tmp_path / "out"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def _until(holds, process, seconds=120.0):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
