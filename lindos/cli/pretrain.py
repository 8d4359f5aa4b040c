"""`lindos pretrain`: train a language model from text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lindos.cli.arguments import count, taken
from lindos.train.reading import configure

NPROC_HELP = "--nproc N starts N local ranks; under torchrun or Slurm it is left out. --recipe: {recipes}."


def main(arguments: Sequence[str]) -> int:
    """Reads the configuration; with --nproc starts the ranks, else is one."""
    from lindos.train.recipes import RECIPES

    ranks, rest = taken(arguments, "--nproc")
    number = count(ranks, "--nproc")
    more = NPROC_HELP.format(recipes=", ".join(RECIPES))
    if number is not None:
        configure(rest, more=more)  # a mistake is found once, before any rank starts
        from lindos.cli.ranks import start

        return start([sys.executable, "-m", "lindos", "pretrain", *rest], number)
    return _rank(rest, more)


def _rank(arguments: Sequence[str], more: str) -> int:
    """One rank: a configuration that only this one cannot read is an error of all."""
    from lindos.core.errors import LindosError

    config, error = None, None
    try:
        config = configure(arguments, more=more)
    except LindosError as found:
        error = found
    if error is not None and not _among_others():
        raise error
    import lindos
    from lindos.comm.launch import leave
    from lindos.train.loop import pretrain

    world = lindos.launch(config.train.seed, config.train.timeout_seconds) if config else lindos.launch()
    world.agree(error, "configuration")
    assert config is not None
    code = pretrain(config, world, lambda text: print(text, flush=True))
    world.barrier("end")
    leave(world)
    return code


def _among_others() -> bool:
    """Whether this process was started as one of several."""
    from lindos.comm import launch

    return launch.place()[1] > 1
