"""Local ranks: one exit code out of many, signals, and the ranks' environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lindos.cli import ranks

LAUNCH = "import sys; from lindos.cli.ranks import start; sys.exit(start([sys.executable, '-c', sys.argv[1]], 2))"


def _start(code, **options):
    return subprocess.run([sys.executable, "-c", LAUNCH, code], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import os, sys; sys.exit(2 if os.environ['RANK'] == '1' else 0)", 2),
        ("import os, sys, time; time.sleep(0.5 * int(os.environ['RANK'])); sys.exit(75)", 75),
        ("import os, signal, time; os.environ['RANK'] == '0' and os.kill(os.getpid(), 9); time.sleep(0.2)", 5),
    ],
)
def test_exit_codes_survive(code, expected):
    assert _start(code).returncode == expected


def test_the_others_are_ended_after_the_first_failure(monkeypatch, capfd):
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.2)
    code = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(4); time.sleep(60)"
    started = time.monotonic()
    assert ranks.start([sys.executable, "-c", code], 2) == 4
    assert time.monotonic() - started < 20


def test_a_killed_rank_is_named():
    out = _start("import os; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9)")
    assert "rank 1 was killed by SIGKILL" in out.stderr


def test_environment_of_a_rank():
    keys = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"]
    code = f"import os; print(*[os.environ[k] for k in {keys}], flush=True)"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    lines = sorted(_start(code, env=environment).stdout.split("\n"))
    threads = max(1, ranks._cores() // 2)
    assert [line for line in lines if line] == [f"{rank} {rank} 2 2 {threads}" for rank in (0, 1)]
    assert (
        "7"
        in _start("import os; print(os.environ['OMP_NUM_THREADS'])", env={**os.environ, "OMP_NUM_THREADS": "7"}).stdout
    )


def test_a_signal_reaches_every_rank_once(tmp_path):
    code = (
        "import os, signal, sys, time\n"
        f"at = {str(tmp_path)!r} + '/' + os.environ['RANK']\n"
        "signal.signal(signal.SIGTERM, lambda *a: (open(at + '.got', 'a').write('x'), sys.exit(75)))\n"
        "open(at, 'w').close()\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", LAUNCH, code])
    _until(lambda: all((tmp_path / rank).exists() for rank in "01"))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 75
    assert [(tmp_path / f"{rank}.got").read_text() for rank in "01"] == ["x", "x"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_ranks_do_not_outlive_the_launcher(tmp_path):
    at = f"{str(tmp_path)!r} + '/' + os.environ['RANK']"
    code = f"import os, time; open({at}, 'w').write(str(os.getpid())); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", LAUNCH, code])
    files = [tmp_path / rank for rank in "01"]
    _until(lambda: all(file.exists() and file.read_text() for file in files))
    process.kill()
    process.wait()
    _until(lambda: not any(_alive(int(file.read_text())) for file in files))


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _until(holds, seconds=30.0):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)
