"""The demonstration: one small Llama under two plans, from the same seed and rows, compared number by number.

`python -m lindos.train.demo` builds a corpus of Python's standard library, pretrains the recipe llama-demo at tp=2 and
again at dp=2 with the same steps, and prints what must hold, each line PASS or FAIL. No download, no GPU; some minutes
on two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lindos.core.errors import DataError, RankError

RECIPE = "llama-demo"
FIRST_STEPS = 20
LOSS_TOLERANCE = 1e-5  # of the first steps, fp32
VALIDATION_TOLERANCE = 5e-3
LEARNT_NATS = 1.5
KNOWN_WORDS = 0.9
PLANS = {"tp=2": ("--parallel.tp", "2"), "dp=2": ()}
EXIT_DIFFERS = 4


@dataclass(frozen=True)
class Outcome:
    """What one plan came to."""

    losses: list[float]
    validation_loss: float
    unigram_entropy: float
    sample: str
    seconds: float
    model: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both plans; 0 when every line says PASS, 4 when the plans differ, 5 when something else fails."""
    parser = argparse.ArgumentParser(prog="python -m lindos.train.demo", description=__doc__)
    parser.add_argument("--run", default=None, help="folder to keep; default: a temporary one")
    parser.add_argument("--corpus", default=None, help="token shards made by lindos data; default: built here")
    parser.add_argument("flags", nargs="*", help="after --: further flags for both runs of lindos pretrain")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.run or temporary)
        started = time.monotonic()
        corpus = Path(given.corpus) if given.corpus else _corpus(folder / "corpus", given.flags)
        outcomes = {name: _pretrain(name, folder, corpus, [*flags, *given.flags]) for name, flags in PLANS.items()}
        print(_table(outcomes), flush=True)
        code = _judge(outcomes, corpus)
        print(f"{time.monotonic() - started:.0f} s in all")
        return code


def _corpus(out: Path, flags: Sequence[str]) -> Path:
    """The recipe's corpus, built once for both runs."""
    from lindos import corpus
    from lindos.train.reading import configure

    data = configure(["--recipe", RECIPE, *flags]).data
    paths = corpus.standard_library()
    print(f"building a corpus of {len(paths)} files of Python's standard library", flush=True)
    tokenizer = corpus.train(corpus.documents(paths), int(data.tokenizer))
    corpus.build(paths, tokenizer, out, validation_fraction=data.validation_fraction)
    return out


def _pretrain(name: str, folder: Path, corpus: Path, flags: Sequence[str]) -> Outcome:
    """One plan on two ranks of one thread each."""
    from lindos.train.metrics import METRICS_FILE, read

    run = folder / name.replace("=", "-")
    words = ["pretrain", "--nproc", "2", "--recipe", RECIPE, "--data", str(corpus), "--run", str(run), *flags]
    print(f"\n--- {name}: lindos {' '.join(words)}", flush=True)
    started = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "lindos", *words]).returncode  # one thread a rank: --nproc sees to it
    if code:
        raise RankError(f"the run at {name} must end with 0, got exit code {code}.")
    lines = read(run / METRICS_FILE)
    final = next((line for line in reversed(lines) if line.get("final")), None)
    if final is None:
        raise DataError(f"{run / METRICS_FILE} must end with a final line, got none.")
    losses = [line["loss"] for line in lines if "loss" in line]
    facts = (final["validation_loss"], final["unigram_entropy"], final["sample"] or "")
    return Outcome(losses, *facts, time.monotonic() - started, run / "model")


def _table(outcomes: dict[str, Outcome]) -> str:
    """The first losses beside each other."""
    a, b = outcomes.values()
    lines = ["", f"{'step':>6}" + "".join(f"{name:>14}" for name in outcomes) + f"{'difference':>14}"]
    for step, (x, y) in enumerate(zip(a.losses[:FIRST_STEPS], b.losses[:FIRST_STEPS]), start=1):
        lines.append(f"{step:>6}{x:>14.7f}{y:>14.7f}{abs(x - y):>14.1e}")
    lines.append(f"{'valid.':>6}{a.validation_loss:>14.7f}{b.validation_loss:>14.7f}")
    lines.append(f"{'s':>6}{a.seconds:>14.0f}{b.seconds:>14.0f}")
    return "\n".join(lines) + "\n"


def _judge(outcomes: dict[str, Outcome], corpus: Path) -> int:
    """Prints a line for each thing that must hold."""
    from lindos import corpus as texts

    a, b = outcomes.values()
    worst = max(abs(x - y) for x, y in zip(a.losses[:FIRST_STEPS], b.losses[:FIRST_STEPS]))
    apart = abs(a.validation_loss - b.validation_loss)
    equal = [
        _line(worst <= LOSS_TOLERANCE, f"first {FIRST_STEPS} losses equal: apart by {worst:.1e}, allowed 1e-5"),
        _line(apart <= VALIDATION_TOLERANCE, f"validation losses equal: apart by {apart:.1e}, allowed 5e-3"),
    ]
    words = texts.words_of(texts.documents(texts.standard_library()))
    batches = list(_validation(corpus))
    rest = []
    for name, one in outcomes.items():
        learnt = one.unigram_entropy - one.validation_loss
        rest.append(_line(learnt >= LEARNT_NATS, f"{name}: {learnt:.2f} nats under the unigram entropy, wanted 1.5"))
        share = texts.known_words_share(one.sample, words)
        clean = "\ufffd" not in one.sample
        rest.append(_line(share >= KNOWN_WORDS and clean, f"{name}: {100 * share:.0f} % known words in {one.sample!r}"))
        found = _exported_loss(one.model, batches)
        away = abs(found - one.validation_loss)
        text = f"{name}: transformers gives the export a validation loss of {found:.6f}, apart by {away:.1e}"
        rest.append(_line(away <= LOSS_TOLERANCE * 10, text))
    return EXIT_DIFFERS if not all(equal) else 0 if all(rest) else RankError.exit_code


def _line(holds: bool, text: str) -> bool:
    print(f"{'PASS' if holds else 'FAIL'} {text}", flush=True)
    return holds


def _validation(corpus: Path) -> Any:
    from lindos.corpus import TokenRows
    from lindos.train.data import validation_batches
    from lindos.train.recipes import recipe

    rows = TokenRows(corpus, "validation", recipe(RECIPE).data.sequence)
    return validation_batches(rows, 16, 1, 0)


def _exported_loss(folder: Path, batches: Sequence[Any]) -> float:
    """The loss of the exported folder, by transformers alone."""
    from lindos.hf.models import validation_loss

    return validation_loss(str(folder), batches)


if __name__ == "__main__":
    sys.exit(main())
