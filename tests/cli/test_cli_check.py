"""`lindos check`: the report of this machine, and of machines that lack something."""

from __future__ import annotations

import json

import pytest
import torch

from lindos import cli
from lindos.cli import check, machine
from lindos.core.errors import RankError

REQUIRED = ["python>=3.10", "torch>=2.11", "transformers>=5.17", "safetensors>=0.5", "tokenizers>=0.20", "numpy>=1.26"]
HERE = {"python": "3.11.2", "torch": "2.13.0+cpu", "transformers": "5.24.0", "safetensors": "0.8", "tokenizers": "0.23",
        "numpy": "2.4"}  # fmt: skip


def test_the_report_of_this_machine(tmp_path, capsys):
    file = tmp_path / "report.json"
    assert cli.main(["check", "--nproc", "2", "--run", str(tmp_path), "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    for heading in ("versions", "devices", "interconnect", "all_reduce between 2 ranks", "disk", "attention kernels"):
        assert f"{heading}\n" in shown
    facts = json.loads(file.read_text())
    assert facts["works"] is True
    assert facts["parts"]["versions"]["torch"].startswith(torch.__version__)
    assert set(facts["parts"]["all_reduce between 2 ranks"]) <= {"memory", "gloo"}
    assert "gloo" in facts["parts"]["all_reduce between 2 ranks"]
    assert facts["parts"]["attention kernels"]["math"] == "runs"
    assert list(tmp_path.iterdir()) == [file], "the disk's file is gone"


def test_supported_versions_are_no_finding():
    part = machine.versions(HERE, REQUIRED)
    assert part.findings == []
    assert part.facts["transformers"] == "5.24.0 (supported: >=5.17)"


@pytest.mark.parametrize(
    ("name", "version", "says"),
    [
        ("transformers", "4.57.1", "transformers: version 4.57.1 is not in >=5.17."),
        ("numpy", None, "numpy: it is not installed."),
        ("python", "3.9.1", "python: version 3.9.1 is not in >=3.10. Use another Python."),
    ],
)
def test_versions_that_do_not_serve(name, version, says):
    part = machine.versions({**HERE, name: version}, REQUIRED)
    assert [finding.essential for finding in part.findings] == [True]
    assert check.closing([part]).startswith(f"What will not work here:\n  FAILS  {says}")


def test_the_ranges_are_those_of_the_package():
    assert machine.versions().facts["torch"].endswith("(supported: >=2.11)")


def test_a_failing_collective_names_itself():
    def run(job, size, transport):
        if transport == "memory":
            raise RankError("[rank 1] died with exit code -9.")
        return [{"wrong": 0, "latency": 1e-3, "bandwidth": 1e9}, {"wrong": 7, "latency": 1e-3, "bandwidth": 1e9}]

    part = machine.collective(2, run)
    texts = [finding.text() for finding in part.findings]
    assert any("all_reduce over memory: it failed: RankError: [rank 1] died" in text for text in texts)
    assert any("all_reduce over gloo: rank 1 got a wrong sum (7 of 1000 numbers)" in text for text in texts)
    assert all(finding.essential for finding in part.findings)


def test_the_collective_is_checked_by_its_numbers(ranks):
    def run(job, size, transport):
        return ranks.run(job, size, transport=transport)

    part = machine.collective(3, run)
    assert part.findings == []
    assert part.facts["gloo"].split()[1] == "us"


def test_no_shared_memory_and_few_files():
    part = machine.limits(shm_bytes=0, files=256)
    assert part.facts["/dev/shm"] == "none"
    assert [finding.what for finding in part.findings] == ["DataLoader workers", "many ranks"]
    assert machine.limits(shm_bytes=1 << 30, files=4096).findings == []


def test_emulated_products_and_no_compiler():
    part = machine.devices({"fp32": 100.0, "bf16": 90.0, "fp16": 2.0})
    assert [finding.what for finding in part.findings] == ["fp16 products"]
    assert machine.compiler(lambda name: None).findings[0].what == "torch.compile"
    assert machine.compiler(lambda name: f"/usr/bin/{name}").findings == []


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", refuse)
    part = machine.disk(tmp_path)
    assert part.findings[0].essential
    assert "Permission denied" in part.findings[0].why


def test_exit_code_when_something_essential_fails(monkeypatch, capsys):
    bad = machine.Part("versions", {}, [machine.Finding("torch", "it is not installed.", "Install it.", True)])
    monkeypatch.setattr(machine, "versions", lambda: bad)
    assert cli.main(["check"]) == 3
    assert capsys.readouterr().out.endswith("FAILS  torch: it is not installed. Install it.\n")
