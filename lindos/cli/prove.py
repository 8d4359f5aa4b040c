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
    if sum((given.type is not None, given.model is not None, given.all)) != 1:
        raise InputError("lindos prove needs one of --type T, --model DIR and --all.")
    if (given.table or given.page or given.only) and not given.all:
        raise InputError(
            "--table, --page and --only go with lindos prove --all; a single proof is remembered by itself."
        )
    for option in ("table", "page", "json"):
        path = Path(getattr(given, option) or "file")
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise InputError(f"--{option} must name a file in a folder that exists, got {path}.")
    names = ("tp", "pp", "sp", "zero", "rules", "recompute", "compile", "activations", "kind")
    axes = {name: getattr(given, name) for name in names}
    if str(given.recompute)[:1].isdigit():
        axes["recompute"] = bytes_of_text(given.recompute)
    options = {
        "dp": given.dp,
        "plugin": given.plugin,
        "micro_batches": given.micro_batches,
        "max_norm": given.max_norm,
        "steps": given.steps,
        **{name: value for name, value in axes.items() if value is not None},  # the plugin has its own defaults
        **({"twin": _sizes(given.twin)} if given.twin else {}),
    }
    return _every(given, options) if given.all else _one(given, options)


def _one(given: Any, options: dict[str, Any]) -> int:
    from lindos import proof

    report = proof.prove(type=given.type, model=given.model, **options)
    print(report.text())
    if given.json:
        _write(Path(given.json), report.json())
    return EXIT_CODES[report.verdict]


def _every(given: Any, options: dict[str, Any]) -> int:
    """0 if no type differs; those that are refused say why."""
    import json

    from lindos.hf import proven
    from lindos.proof import every

    table = Path(given.table) if given.table else None
    lines = every.prove_all(given.only.split(",") if given.only else None, table=table, **options)
    print(every.summary(lines))
    if given.page:
        _write(Path(given.page), every.page(table or proven.SHIPPED))
    if given.json:
        _write(Path(given.json), json.dumps([line.facts() for line in lines], indent=1))
    return (
        EXIT_CODES["differs"] if any(line.verdict in ("differs", "failed") for line in lines) else EXIT_CODES["equal"]
    )


def _sizes(text: str) -> dict[str, Any]:
    """`heads=6,kv_heads=3,tied=true`.

    Raises:
        InputError: not of that form.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, sign, value = part.partition("=")
        if not sign or not (value.isdigit() or value in ("true", "false")):
            raise InputError(f"--twin takes sizes such as heads=6,kv_heads=3,tied=true; got {part!r}.")
        found[name.strip()] = int(value) if value.isdigit() else value == "true"
    return found


def _parser() -> Parser:
    parser = Parser(prog="lindos prove", description="Compare a plan with one process, number by number.")
    parser.add_argument("--type", help="model type of transformers; a small twin of it is compared")
    parser.add_argument("--model", help="folder with config.json")
    parser.add_argument("--all", action="store_true", help="every causal type, one by one")
    parser.add_argument("--only", help="with --all: these types, separated by commas")
    parser.add_argument("--table", help="with --all: JSON table that verdicts are added to")
    parser.add_argument("--page", help="with --all: write the table as a page of text")
    parser.add_argument("--kind", help="kind of model: causal, masked, classification, ... (the type's own)")
    parser.add_argument("--twin", help="sizes of the twin: heads=6,kv_heads=3,vocabulary=131,tied=true")
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
        raise InputError(f"{file} cannot be written: {error.strerror}.") from error
