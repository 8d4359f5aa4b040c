"""`lindos run`: start a script of your own on several local ranks, through torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lindos.cli.arguments import count
from lindos.cli.ranks import EXIT_RANK, _cores
from lindos.core.errors import InputError, RefusedError, nearest

USAGE = "usage: lindos run --nproc N script.py ARGS\n\nStarts N local ranks of a script that calls lindos.launch()."
FLAGS = ("--nproc", "--hostfile", "--help")


def main(arguments: Sequence[str]) -> int:
    """Flags before the script are ours, what follows it is the script's."""
    words, number = list(arguments), None
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        if name in ("-h", "--help"):
            print(USAGE)
            return 0
        if name == "--hostfile":
            raise RefusedError("lindos run --hostfile is not served yet. Start torchrun or srun on every host instead.")
        if name != "--nproc":
            raise InputError(f"lindos run has no flag {name}: {nearest(name, FLAGS)}. Flags of the script follow it.")
        number = count(value if equals else (words.pop(0) if words else ""), "--nproc")
    if not words:
        raise InputError("lindos run needs a script, got none: lindos run --nproc N script.py ARGS.")
    if not Path(words[0]).is_file():
        close = [str(path) for path in Path(words[0]).parent.glob("*.py")]
        raise InputError(f"the script {words[0]} does not exist: {nearest(words[0], close)}.")
    return _torchrun(words, number or 1)


def _torchrun(words: list[str], number: int) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}", "--"]
    environment = {**os.environ}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // number)))
    process = subprocess.Popen([*command, *words], env=environment, start_new_session=True)

    def pass_on(received: int, frame: Any) -> None:
        process.send_signal(received)

    before = {kind: signal.signal(kind, pass_on) for kind in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = process.wait()
    finally:
        for kind, old in before.items():
            signal.signal(kind, old)
    return 0 if code == 0 else EXIT_RANK  # torchrun itself turns every failure into 1
