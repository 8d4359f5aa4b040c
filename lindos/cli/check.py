"""`lindos check`: what this machine can do, and what will not work on it and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lindos.cli import machine
from lindos.cli.arguments import Parser, count
from lindos.core.errors import InputError

EXIT_FAILS = 3


def main(arguments: Sequence[str]) -> int:
    """Prints each part as it is found; 0, or 3 where something essential fails."""
    parser = Parser(prog="lindos check", description="What this machine can do, and what will not work on it.")
    parser.add_argument("--nproc", default="2", help="ranks of the collective that is tried (2)")
    parser.add_argument("--run", default=".", help="folder whose disk is measured (this one)")
    parser.add_argument("--json", help="file for the report")
    given = parser.read(arguments)
    nproc = count(given.nproc, "--nproc")
    assert nproc is not None
    parts = []
    for part in survey(nproc, given.run):
        parts.append(part)
        print(text_of(part), flush=True)
    print("\n" + closing(parts))
    if given.json:
        _write(Path(given.json), report(parts))
    return EXIT_FAILS if any(finding.essential for part in parts for finding in part.findings) else 0


def survey(nproc: int, folder: str) -> Iterator[machine.Part]:
    """The parts, in the order of the report. Without torch there are no others than the versions."""
    yield (first := machine.versions())
    if any(finding.what == "torch" and "installed" in finding.why for finding in first.findings):
        return
    parts: list[Callable[[], machine.Part]] = [
        machine.devices,
        machine.interconnect,
        lambda: machine.collective(nproc),
        lambda: machine.disk(folder),
        machine.attention,
        machine.compiler,
        machine.limits,
    ]
    for part in parts:
        yield part()


def text_of(part: machine.Part) -> str:
    """A heading and a line for each fact."""
    width = max((len(name) for name in part.facts), default=0)
    return "\n".join([part.name, *(f"  {name:{width}}  {value}" for name, value in part.facts.items())])


def closing(parts: Sequence[machine.Part]) -> str:
    """What will not work here, what lindos cannot do without first."""
    findings = sorted((f for part in parts for f in part.findings), key=lambda finding: not finding.essential)
    if not findings:
        return "Everything that was tried works here."
    lines = [f"  {'FAILS' if finding.essential else 'note '}  {finding.text()}" for finding in findings]
    return "\n".join(["What will not work here:", *lines])


def report(parts: Sequence[machine.Part]) -> dict[str, Any]:
    """The same for programs."""
    findings = [vars(finding) for part in parts for finding in part.findings]
    return {
        "works": not any(finding["essential"] for finding in findings),
        "parts": {part.name: part.facts for part in parts},
        "findings": findings,
    }


def _write(file: Path, content: dict[str, Any]) -> None:
    import json

    try:
        file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise InputError(f"--json must name a file that can be written, got {file}: {error.strerror}.") from error
