"""The command line: `lindos COMMAND ...`. Commands are imported when they are called; help needs no torch."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from lindos.core.errors import InputError, LindosError, RankError, RefusedError, nearest

COMMANDS = {
    "pretrain": "train a language model from text",
    "prove": "compare a plan with one process, number by number",
    "run": "start a script of your own on several ranks",
    "data": "turn text into token shards",
    "export": "turn a checkpoint into a Hugging Face folder",
    "check": "what this machine can do, and what will not work on it",
    "generate": "continue a text with a model folder or a checkpoint",
}
LATER = ("finetune", "inspect", "convert", "plan", "fleet")
EXIT_DONE, EXIT_RANK = 0, 5

USAGE = (
    "usage: lindos COMMAND ...\n\n"
    + "\n".join(f"  {name:10}{text}" for name, text in COMMANDS.items())
    + "\n\nlindos COMMAND --help says more. Exit codes: 0 done, 2 bad input, 3 refused, 4 differs, 5 a rank failed, "
    "75 saved after a signal."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; errors of lindos become one message on standard error."""
    code = _main(list(sys.argv[1:] if argv is None else argv))
    world = _world()
    if world is not None and world.size > 1:
        # All is said and left. The interpreter's own end would still meet threads inside torch's store and process
        # groups, which now and then abort the process and so replace the code.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _main(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except LindosError as error:
        _report(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + 2
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_DONE if stop.code is None else 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
        return EXIT_DONE
    except Exception as error:
        _crash(error)
        return EXIT_RANK


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return EXIT_DONE if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(version("lindos"))
        return EXIT_DONE
    command, rest = arguments[0], arguments[1:]
    if command in LATER:
        raise RefusedError(f"lindos {command} is not served yet. Served: {', '.join(COMMANDS)}.")
    if command not in COMMANDS:
        raise InputError(f"there is no command {command!r}: {nearest(command, COMMANDS)}.")
    return import_module(f"lindos.cli.{command}").main(rest)


def _report(error: LindosError) -> None:
    """One message. Under several ranks the first prints what all raise; the others are told of one's own."""
    world = _world()
    if world is not None and world.size > 1:
        world.link.watch.report(error)  # nobody waits for this rank any longer
    if world is None or world.rank == 0 or _speaks_for_first(world, error):
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    if world is not None:
        sys.modules["lindos.comm.launch"].leave(world)


def _speaks_for_first(world: object, error: LindosError) -> bool:
    """Rank 1 prints what rank 0 would, where that one is dead."""
    dead = "rank 0: did not arrive; gives no answer" in str(error) or "Rank 0 is dead" in str(error)
    return isinstance(error, RankError) and world.rank == 1 and dead  # type: ignore[attr-defined]


def _crash(error: Exception) -> None:
    """A fault of lindos or of a library: the whole trace, from the rank that has it."""
    world, title = _world(), ""
    if world is not None and world.size > 1:
        world.link.watch.report(error)
        title = world.title() + "\n"
    sys.stderr.write(title + "".join(traceback.format_exception(error)))  # in one piece, as other ranks write too
    sys.stderr.flush()
    if world is not None:
        sys.modules["lindos.comm.launch"].leave(world)


def _world():  # type: ignore[no-untyped-def]
    """The world of this process, where there is one."""
    launching = sys.modules.get("lindos.comm.launch")
    return launching.launched() if launching else None
