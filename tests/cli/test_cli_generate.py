"""`lindos generate`: from a run's checkpoint, from an export, on two ranks; and what it refuses."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys

import pytest

from lindos import cli
from lindos.comm import launch
from lindos.hf.models import load_tokenizer

WORDS = ["the", "a", "cat", "dog", "bird", "tree", "house", "sat", "ran", "on", "under", "red", "blue", "slow"]
SIZES = {"data.tokenizer": 300, "data.sequence": 32, "data.validation_fraction": 0.05, "model.hidden": 32,
         "model.layers": 2, "model.heads": 4, "model.intermediate": 64, "train.batch_tokens": 256,
         "train.tokens": 256 * 80, "train.save_every": 40, "optim.lr": 1e-2, "log.sample_tokens": 4}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints and an export."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text").mkdir()
    chance = random.Random(0)
    for number in range(8):
        lines = (" ".join(chance.choices(WORDS, k=9)) + "." for _ in range(150))
        (folder / "text" / f"{number}.txt").write_text("\n".join(lines) + "\n")
    flags = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    command = ["pretrain", "--data", str(folder / "text"), "--run", str(folder / "run"), *flags]
    done = subprocess.run([sys.executable, "-m", "lindos", *command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def _run(*words):
    """In a process of its own, since a process launches once."""
    command = [sys.executable, "-m", "lindos", "generate", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture
def here(monkeypatch, capsys):
    """In this process."""

    def call(*words):
        monkeypatch.setattr(launch, "_process", [])
        code = cli.main(["generate", *map(str, words)])
        return code, capsys.readouterr()

    return call


def test_a_checkpoint_an_export_and_two_ranks_say_the_same(run, here, tmp_path):
    words = ["--prompt", "the cat", "--max-tokens", "12"]
    code, shown = here(run, *words)
    assert code == 0
    assert set(shown.out.replace(".", " ").split()) & set(WORDS)
    assert here(run / "step-80", *words)[1].out == shown.out
    assert here(run / "model", *words)[1].out == shown.out
    assert here(run / "model", *words, "--stream", "--greedy")[1].out == shown.out
    assert here(run / "step-40", *words)[1].out != shown.out
    both = _run(run, *words, "--nproc", "2", "--tp", "2")
    assert (both.returncode, both.stdout) == (0, shown.out), both.stderr

    moved = tmp_path / "alone" / "step-80"
    shutil.copytree(run / "step-80", moved)
    code, shown_alone = here(moved, *words)
    assert code == 2
    assert "Give --model FOLDER" in shown_alone.err
    assert here(moved, *words, "--model", run / "model")[1].out == shown.out


def test_draws_repeat_by_their_seed(run, here):
    words = [run, "--prompt", "the", "--temperature", "1", "--top-k", "20", "--top-p", "0.95", "--max-tokens", "16"]
    first, again, other = (here(*words, "--seed", seed)[1].out for seed in (1, 1, 2))
    assert first == again
    assert first != other
    split = _run(*words, "--seed", 1, "--nproc", 2)
    assert (split.returncode, split.stdout) == (0, first), split.stderr


def test_several_prompts_and_a_chat(run, here, tmp_path):
    code, shown = here(run / "model", "--prompt", "the cat", "--prompt", "a dog", "--max-tokens", "4")
    assert code == 0
    assert shown.out.startswith("--- the cat\n")
    assert "\n--- a dog\n" in shown.out
    code, shown = here(run / "model", "--prompt", "the cat", "--chat")
    assert code == 2
    assert "no chat template" in shown.err
    chat = tmp_path / "chat"
    shutil.copytree(run / "model", chat)
    tokenizer = load_tokenizer(str(chat))
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }} sat on{% endfor %}"
    tokenizer.save_pretrained(chat)
    plain = here(chat, "--prompt", "the cat sat on", "--max-tokens", "4")[1].out
    assert here(chat, "--prompt", "the cat", "--chat", "--max-tokens", "4")[1].out == plain


def test_the_last_position_is_the_end(run, here):
    code, shown = here(run / "model", "--prompt", "the cat sat on the red house", "--max-tokens", "500")
    assert code == 0
    assert "note: the model has 32 positions" in shown.err
    code, shown = here(run / "model", "--prompt", "the cat sat on " * 40)
    assert code == 2
    assert "must leave room in the model's 32 positions" in shown.err


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["{run}"], 2, "needs a --prompt"),
        (["{run}/nothing", "--prompt", "x"], 2, "there is no folder"),
        (["{run}", "--prompt", "x", "--top-k", "3"], 2, "Give a temperature"),
        (["{run}", "--prompt", "x", "--greedy", "--temperature", "1"], 2, "Give one"),
        (["{run}", "--prompt", "x", "--top-q", "1"], 2, "did you mean '--top-p'"),
        (["{run}", "--prompt", "x", "--tp", "2"], 2, "Give --nproc 2"),
        (["{run}/corpus", "--prompt", "x"], 2, "expected a checkpoint"),
    ],
)
def test_mistakes(run, here, words, code, part):
    found, shown = here(*(word.format(run=run) for word in words))
    assert found == code
    assert part in shown.err
    assert shown.err.count("\n") == 1


def test_folders_that_do_not_serve(run, here, tmp_path):
    bare, remote, encoder = (tmp_path / name for name in ("bare", "remote", "encoder"))
    shutil.copytree(run / "model", bare, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*", "vocab*"))
    code, shown = here(bare, "--prompt", "x")
    assert (code, "no tokenizer can be loaded" in shown.err) == (2, True), shown.err
    assert here(bare, "--prompt", "the", "--tokenizer", run / "model")[0] == 0

    shutil.copytree(run / "model", remote)
    config = json.loads((remote / "config.json").read_text())
    (remote / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "evil.Config"}}))
    code, shown = here(remote, "--prompt", "x")
    assert code == 3
    assert "--trust-remote-code" in shown.err

    encoder.mkdir()
    (encoder / "config.json").write_text('{"model_type": "t5"}')
    code, shown = here(encoder, "--prompt", "x")
    assert code == 3
    assert "t5 model, which is no causal one" in shown.err


def test_code_that_is_trusted_runs(run, here, tmp_path):
    folder = tmp_path / "trusted"
    shutil.copytree(run / "model", folder)
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": names}))
    words = ["--prompt", "the cat", "--max-tokens", "6"]
    code, shown = here(folder, *words, "--trust-remote-code")
    assert (code, shown.out) == (0, here(run / "model", *words)[1].out), shown.err
