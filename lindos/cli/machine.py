"""What this machine is, part by part: facts, and what will not work on it. `lindos check` prints them.

Each part can be given what it would otherwise ask the machine for, so that a test can show it another machine.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "numpy")
MIB = 1 << 20
CHUNK_BYTES, MOST_BYTES = 16 * MIB, 2048 * MIB
SLOW = 20  # a product this many times slower than fp32 is emulated


@dataclass(frozen=True)
class Finding:
    """Something that does not work here.

    Attributes:
        what, why, do: what it is, why, and what to do about it.
        essential: whether lindos cannot train here because of it.
    """

    what: str
    why: str
    do: str
    essential: bool = False

    def text(self) -> str:
        return f"{self.what}: {self.why} {self.do}"


@dataclass
class Part:
    """A part of the report: facts by name, and what was found not to work."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def versions(found: Mapping[str, str | None] | None = None, required: list[str] | None = None) -> Part:
    """Versions of Python and the packages against the ranges that lindos declares.

    Args:
        found: version by package, "python" included; None for one that is missing. Default: what is installed.
        required: requirements as in pyproject.toml. Default: those of the installed lindos.
    """
    from importlib import metadata

    from packaging.requirements import Requirement
    from packaging.version import Version

    if required is None:
        python = metadata.metadata("lindos").get("Requires-Python") or ""
        required = [f"python{python}", *(r for r in metadata.requires("lindos") or [] if "extra ==" not in r)]
    ranges = {parsed.name: parsed.specifier for parsed in map(Requirement, required)}
    part = Part("versions", {"lindos": metadata.version("lindos")})
    for name in ("python", *PACKAGES):
        version, allowed = (_installed(name) if found is None else found.get(name)), ranges.get(name)
        part.facts[name] = f"{version or 'missing'}" + (f" (supported: {allowed})" if allowed else "")
        if version is None or (allowed is not None and not allowed.contains(Version(version), prereleases=True)):
            why = "it is not installed." if version is None else f"version {version} is not in {allowed}."
            do = "Use another Python." if name == "python" else f'Run pip install "{name}{allowed or ""}".'
            part.findings.append(Finding(name, why, do, essential=True))
    return part


def _installed(name: str) -> str | None:
    import platform
    from importlib import metadata

    if name == "python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def devices(speeds: Mapping[str, float] | None = None) -> Part:
    """Accelerators, processors and memory, and the rate of products in each dtype.

    Args:
        speeds: GFLOP/s by dtype; default: measured on this rank's device.
    """
    import torch

    from lindos.parallel.products import emulated

    part = Part("devices")
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        current = torch.accelerator.current_accelerator()
        assert current is not None
        device = torch.device(current.type, 0)
        part.facts["accelerators"] = f"{torch.accelerator.device_count()} x {current.type}"
        if device.type == "cuda":
            facts = torch.cuda.get_device_properties(0)
            part.facts["accelerator"] = f"{facts.name}, {facts.total_memory >> 20} MiB"
    else:
        part.facts["accelerators"] = "none: ranks compute on the CPU"
    part.facts["cpus"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    part.facts.update(_memory())
    speeds = _speeds(device) if speeds is None else speeds
    part.facts.update({f"product {name}": f"{rate:.0f} GFLOP/s" for name, rate in speeds.items()})
    if device.type == "cpu":
        part.facts["bf16 units"] = "no: torch emulates, lindos computes through fp32" if emulated() else "yes"
    for name in ("bf16", "fp16"):
        if speeds.get(name, speeds["fp32"]) * SLOW < speeds["fp32"]:
            widened = name == "bf16" and device.type == "cpu"
            do = "lindos widens its linear layers to fp32; the model's other products stay slow." if widened else ""
            why = f"it is emulated on this {device.type}, {speeds['fp32'] / speeds[name]:.0f} x slower than fp32."
            part.findings.append(Finding(f"{name} products", why, do or "Use fp32 or bf16."))
    return part


def _speeds(device: Any) -> dict[str, float]:
    import torch

    found = {}
    for name, dtype, size in (
        ("fp32", torch.float32, 512),
        ("bf16", torch.bfloat16, 512),
        ("fp16", torch.float16, 256),
    ):
        x = torch.randn(size, size).to(device, dtype)
        y, times = x @ x, []
        for _ in range(5):
            started = time.perf_counter()
            y = x @ x
            float(y[0, 0])  # waits for the device
            times.append(time.perf_counter() - started)
        found[name] = 2 * size**3 / min(times) / 1e9
    return found


def _memory() -> dict[str, str]:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        facts = {f"memory {key}": f"{int(lines[name].split()[0]) >> 10} MiB"
                 for key, name in (("total", "MemTotal"), ("available", "MemAvailable"))}  # fmt: skip
    except (OSError, ValueError, KeyError):
        return {}
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and limit.read_text().strip().isdigit():
        facts["memory limit of this container"] = f"{int(limit.read_text()) >> 20} MiB"
    return facts


def interconnect() -> Part:
    """How ranks of this host talk to each other."""
    import torch
    import torch.distributed as dist

    from lindos.comm.world import host_name, shared_memory_serves

    part = Part("interconnect")
    if not dist.is_available():
        part.findings.append(
            Finding("torch.distributed", "this torch is built without it.", "Install another build.", True)
        )
        return part
    part.facts["gloo"], part.facts["nccl"] = dist.is_gloo_available(), dist.is_nccl_available()
    memory = shared_memory_serves([host_name()] * 2)
    part.facts["ranks of this host"] = "through shared memory" if memory else "through gloo"
    if torch.cuda.is_available() and not part.facts["nccl"]:
        why = "this torch is built without it, and several CUDA devices talk through it."
        part.findings.append(Finding("nccl", why, "Install another build of torch.", True))
    if not part.facts["gloo"]:
        part.findings.append(
            Finding("gloo", "this torch is built without it.", "Install another build of torch.", True)
        )
    return part


def _reduce(world: Any) -> dict[str, float]:
    """Job of a rank: sums whose numbers are known, then their latency and bandwidth."""
    import torch

    torch.set_num_threads(1)
    mine = torch.arange(1000.0) + world.rank
    sum_ = world.all_reduce(mine, world.all, "check")
    expected = world.size * torch.arange(1000.0) + sum(range(world.size))
    wrong = int((sum_ != expected).sum())

    def seconds(elements: int, times: int) -> float:
        value = torch.ones(elements)
        taken = []
        for _ in range(times):
            started = time.perf_counter()
            world.all_reduce(value.clone(), world.all, "check")
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    return {"wrong": wrong, "latency": seconds(16, 40), "bandwidth": 4 * MIB * 4 / seconds(4 * MIB, 5)}


def collective(nproc: int = 2, run: Callable[..., list[Any]] | None = None) -> Part:
    """An all_reduce between ranks that are started here, with its numbers checked, over each way of this host.

    Args:
        run: `run(job, size, transport=...)`, which gives each rank's result; default: processes of their own.
    """
    from lindos.comm.ranks import Ranks
    from lindos.comm.world import host_name, shared_memory_serves

    part = Part(f"all_reduce between {nproc} ranks")
    ways = ["memory", "gloo"] if shared_memory_serves([host_name()] * 2) else ["gloo"]
    ranks = Ranks(preload=["torch"]) if run is None else None
    try:
        for way in ways:
            try:
                seen = (run or ranks.run)(_reduce, nproc, transport=way)  # type: ignore[union-attr]
            except Exception as error:  # whatever it is, it is the answer
                why = f"it failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                part.findings.append(Finding(f"all_reduce over {way}", why, "Several ranks cannot run here.", True))
                continue
            wrong = [rank for rank, facts in enumerate(seen) if facts["wrong"]]
            if wrong:
                why = f"rank {wrong[0]} got a wrong sum ({seen[wrong[0]]['wrong']} of 1000 numbers)."
                part.findings.append(
                    Finding(f"all_reduce over {way}", why, "Do not train on several ranks here.", True)
                )
            latency, bandwidth = (statistics.median(f[key] for f in seen) for key in ("latency", "bandwidth"))
            part.facts[way] = f"{latency * 1e6:.0f} us for 64 bytes, {bandwidth / 1e9:.2f} GB/s at 16 MiB"
    finally:
        if ranks is not None:
            ranks.close()
    return part


def disk(folder: str | Path = ".", seconds: float = 1.0) -> Part:
    """Speed of the disk that a folder lies on: write with fsync, then read, for about a second each."""
    part = Part("disk")
    folder = Path(folder)
    base = next((p for p in (folder, *folder.absolute().parents) if p.is_dir()), Path("/"))
    part.facts["folder"] = str(folder.absolute())
    free = shutil.disk_usage(base).free
    part.facts["free"] = f"{free >> 20} MiB"
    most = min(MOST_BYTES, free // 4)
    try:
        with tempfile.TemporaryFile(dir=base) as file:
            written, rate = _write(file, most, seconds)
            part.facts["write and fsync"] = f"{rate / 1e6:.0f} MB/s over {written >> 20} MiB"
            part.facts["read"] = f"{_read(file, seconds) / 1e6:.0f} MB/s"
    except OSError as error:
        why = f"nothing can be written in {base}: {error.strerror}."
        part.findings.append(Finding("the run folder", why, "Name another with --run.", True))
    return part


def _write(file: Any, most: int, seconds: float) -> tuple[int, float]:
    block, written, started = os.urandom(CHUNK_BYTES), 0, time.perf_counter()
    while not written or (time.perf_counter() - started < seconds and written + CHUNK_BYTES <= most):
        file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written += CHUNK_BYTES
    return written, written / (time.perf_counter() - started)


def _read(file: Any, seconds: float) -> float:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, not from memory
    file.seek(0)
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds and (block := file.read(CHUNK_BYTES)):
        done += len(block)
    return done / (time.perf_counter() - started)


def attention() -> Part:
    """Which kernels of scaled_dot_product_attention run on this device."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    accelerator = torch.accelerator.is_available()
    kind = torch.accelerator.current_accelerator().type if accelerator else "cpu"  # type: ignore[union-attr]
    part = Part("attention kernels", {"device": kind})
    query = torch.randn(1, 2, 16, 16, device=kind, dtype=torch.bfloat16 if accelerator else torch.float32)
    kernels = {
        "math": "MATH",
        "flash": "FLASH_ATTENTION",
        "efficient": "EFFICIENT_ATTENTION",
        "cudnn": "CUDNN_ATTENTION",
    }
    for name, backend in kernels.items():
        part.facts[name] = "runs"
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        except (RuntimeError, AttributeError) as error:
            part.facts[name] = f"not on this {kind} ({' '.join(str(error).split())[:60]})"
    if part.facts["flash"] != "runs":
        why = f"torch has no flash kernel for this {kind}."
        part.findings.append(Finding("flash attention", why, "Attention runs by another kernel: more memory, slower."))
    return part


def compiler(which: Callable[[str], str | None] = shutil.which) -> Part:
    """A compiler for torch.compile."""
    found = next((path for name in (os.environ.get("CXX") or "g++", "g++", "clang++") if (path := which(name))), None)
    part = Part("compiler", {"C++": found or "none"})
    if not found:
        part.findings.append(Finding("torch.compile", "there is no C++ compiler (g++ or clang++).", "Install g++."))
    return part


def limits(shm_bytes: int | None = None, files: int | None = None) -> Part:
    """Shared memory and the limits of this process that matter to ranks.

    Args:
        shm_bytes, files: size of /dev/shm (0: there is none) and limit of open files; default: as they are.
    """
    import resource

    if shm_bytes is None:
        shm_bytes = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if files is None else files
    part = Part("limits", {"/dev/shm": f"{shm_bytes >> 20} MiB" if shm_bytes else "none", "open files": _limit(files)})
    for name, key in (
        ("locked memory (KiB)", "RLIMIT_MEMLOCK"),
        ("address space", "RLIMIT_AS"),
        ("processes", "RLIMIT_NPROC"),
    ):
        value = resource.getrlimit(getattr(resource, key))[0]
        part.facts[name] = _limit(value // 1024 if key == "RLIMIT_MEMLOCK" and value > 0 else value)
    if shm_bytes < 64 * MIB:
        why = "there is no /dev/shm." if not shm_bytes else f"/dev/shm holds only {shm_bytes >> 20} MiB."
        do = "Use num_workers=0, or mount a larger one (docker run --shm-size=1g). NCCL needs it too."
        part.findings.append(Finding("DataLoader workers", why, do))
    if 0 <= files < 1024:
        why = f"a process may open only {files} files; each rank opens several for each other one."
        part.findings.append(Finding("many ranks", why, "Run ulimit -n 4096 first."))
    return part


def _limit(value: int) -> str:
    return "unlimited" if value < 0 or value >= 1 << 62 else str(value)
