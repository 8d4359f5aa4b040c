"""Mistakes on the command line: one message, the right exit code, the nearest name, no torch for help."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lindos import cli
from lindos.core.errors import NumbersError


def _run(capsys, *words):
    code = cli.main(list(words))
    return code, capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("pretrian", 2, "did you mean 'pretrain'"),
        ("inspect", 3, "lindos inspect is not served yet"),
        ("check --nproc 0", 2, "--nproc must be a whole number"),
        ("check --nprocs 2", 2, "did you mean '--nproc'"),
        ("finetune --x", 3, "not served yet"),
        ("pretrain --nproc 0", 2, "--nproc must be a whole number"),
        ("pretrain --nproc", 2, "--nproc needs a value"),
        ("pretrain --nproc 2 --train.tokns 5", 2, "did you mean '--train.tokens'"),
        ("pretrain --recipe llama-8b", 2, "there is no recipe 'llama-8b'"),
        ("prove", 2, "one of --type T, --model DIR and --all"),
        ("prove --all --type llama", 2, "one of --type T, --model DIR and --all"),
        ("prove --all --only llma --tp 2", 2, "did you mean 'llama'"),
        ("prove --type llama --only gpt2", 2, "go with lindos prove --all"),
        ("prove --type llama --twin heads", 2, "--twin takes sizes such as"),
        ("prove --tipe llama", 2, "did you mean '--type'"),
        ("prove --type llama --tp two", 2, "--tp"),
        ("run", 2, "needs a script"),
        ("run --nprocs 2 x.py", 2, "did you mean '--nproc'"),
        ("run --hostfile h x.py", 3, "--hostfile is not served yet"),
        ("run --nproc 2 nothing.py", 2, "nothing.py does not exist"),
        ("data x", 2, "--out"),
        ("data nothing.txt --tokenizer 300 --out out", 2, "every path must exist"),
        ("export nothing out", 2, "expected a checkpoint"),
    ],
)
def test_one_message_and_the_exit_code(capsys, words, code, part):
    found, shown = _run(capsys, *words.split())
    assert found == code
    assert part in shown.err
    assert "Traceback" not in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == "" or "data" in words


def test_numbers_that_are_not_finite_exit_5(capsys, monkeypatch):
    def fail(arguments):
        raise NumbersError("the loss is nan")

    monkeypatch.setattr(cli, "_dispatch", fail)
    code, shown = _run(capsys)
    assert (code, shown.err) == (5, "NumbersError: the loss is nan\n")


def test_a_fault_shows_its_trace(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_dispatch", lambda arguments: 1 / 0)
    code, shown = _run(capsys)
    assert code == 5
    assert "ZeroDivisionError" in shown.err


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_imports_no_torch(command):
    words = [*command.split(), "--help"]
    code = f"import sys; from lindos.cli import main; sys.exit(main({words!r}) or 9 * ('torch' in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    assert "usage: lindos" in out.stdout


def test_python_m_lindos():
    out = subprocess.run([sys.executable, "-m", "lindos", "--version"], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0
    assert out.stdout.strip()


def test_run_starts_ranks_of_a_script_and_maps_failures(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "text = f'rank {os.environ[\"RANK\"]} {sys.argv[1:]}\\n'\n"
        "os.write(1, text.encode())  # in one piece: both ranks write to one pipe\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    command = [sys.executable, "-m", "lindos", "run", "--nproc", "2", str(script)]
    done = subprocess.run([*command, "0", "--nproc"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} ['0', '--nproc']" for rank in (0, 1)]
    assert subprocess.run([*command, "3"], capture_output=True, timeout=120).returncode == 5


def test_data_makes_a_corpus_that_is_reused(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log\n" * 200 + " ".join(dir(str)) * 2)
    words = ["data", str(text), "--tokenizer", "300", "--out", str(tmp_path / "out")]
    for _ in range(2):
        code, shown = _run(capsys, *words)
        assert code == 0
        assert "unigram entropy" in shown.out
