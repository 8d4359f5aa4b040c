"""`lindos prove`: compare a plan with one process, number by number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lindos.cli.arguments import Parser
from lindos.core.errors import InputError
from lindos.core.units import bytes_of_text
from lindos.train.config import PLUGINS

EXIT_CODES = {"equal": 0, "refused": 3, "differs": 4}


def main(arguments: Sequence[str]) -> int:
    """Prints the report; 0 equal, 3 refused, 4 differs."""
    given = _parser().read(arguments)
    if given.all:
        raise InputError("lindos prove --all is served by a later version. Give --type T or --model DIR.")
    if (given.type is None) == (given.model is None):
        raise InputError("lindos prove needs one of --type T and --model DIR.")

    from lindos import proof

    names = ("tp", "pp", "sp", "zero", "rules", "recompute", "compile", "activations")
    axes = {name: getattr(given, name) for name in names}
    if str(given.recompute)[:1].isdigit():
        axes["recompute"] = bytes_of_text(given.recompute)
    report = proof.prove(
        type=given.type,
        model=given.model,
        dp=given.dp,
        plugin=given.plugin,
        micro_batches=given.micro_batches,
        max_norm=given.max_norm,
        steps=given.steps,
        **{name: value for name, value in axes.items() if value is not None},  # the plugin has its own defaults
    )
    print(report.text())
    if given.json:
        _write(Path(given.json), report.json())
    return EXIT_CODES[report.verdict]


def _parser() -> Parser:
    parser = Parser(prog="lindos prove", description="Compare a plan with one process, number by number.")
    parser.add_argument("--type", help="model type of transformers; a small twin of it is compared")
    parser.add_argument("--model", help="folder with config.json")
    parser.add_argument("--all", action="store_true", help="every causal type (served later)")
    for axis, of in (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline"), ("sp", "sequence")):
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"{of} parallel ranks (1)")
    parser.add_argument("--zero", type=int, default=None, help="ZeRO stage, 0 to 3 (the plugin's own)")
    parser.add_argument("--plugin", default=None, choices=PLUGINS, help="plugin that the axes are given to")
    parser.add_argument("--recompute", help="none, full, selective, or a budget such as 200KiB")
    parser.add_argument("--compile", action="store_true", default=None, help="compile the blocks")
    parser.add_argument("--activations", help="where what blocks save rests: device or host")
    parser.add_argument("--rules", help="TOML file of rules")
    parser.add_argument("--micro-batches", "--micro_batches", type=int, default=1, help="parts of a step (1)")
    parser.add_argument("--max-norm", "--max_norm", type=float, default=None, help="clip to this norm (no clipping)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (3)")
    parser.add_argument("--json", help="file for the report")
    return parser


def _write(file: Path, content: Any) -> None:
    import json

    try:
        file.write_text(content if isinstance(content, str) else json.dumps(content, indent=2) + "\n", "utf-8")
    except OSError as error:
        raise InputError(f"--json must name a file that can be written, got {file}: {error.strerror}.") from error
