"""metrics.jsonl: a header that says what is counted, then a line a step and a line a validation."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

METRICS_FILE = "metrics.jsonl"
MFU_FORMULA = (
    "mfu = tokens_per_second x (6 N + 12 L H T) / peak_flops; N parameters, L layers, H hidden size, T sequence "
    "(PaLM, arXiv 2204.02311, appendix B)"
)

# Dense peak of the matrix units in bf16 and fp16, and of fp32 outside them, flops a second (vendors' data sheets).
DEVICES_FLOPS = {
    "B200": (2250e12, 80e12),
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "A10": (125e12, 31.2e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
}


def flops_per_token(parameters: int, layers: int, hidden: int, sequence: int) -> float:
    """Flops that training spends on a token, forward and backward, attention over the whole sequence included."""
    return 6 * parameters + 12 * layers * hidden * sequence


def sizes_of(model: nn.Module) -> tuple[int, int, int]:
    """Parameters (a tied one once), layers and hidden size of a whole model."""
    config = model.config.get_text_config()
    return (
        sum(parameter.numel() for parameter in model.parameters()),
        int(getattr(config, "num_hidden_layers", 0) or 0),
        int(getattr(config, "hidden_size", 0) or 0),
    )


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """Peak of one rank's device, flops a second, and where the number comes from."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, (half, single) in DEVICES_FLOPS.items():
            if known in name:
                return (single if precision == "fp32" else half), f"data sheet of {known}"
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    best_seconds = math.inf
    for _ in range(4):
        _wait(device)
        started = time.perf_counter()
        a @ a
        _wait(device)
        best_seconds = min(best_seconds, time.perf_counter() - started)
        if best_seconds > 0.5:
            break
    return 2 * size**3 / best_seconds, f"fastest of a few {size} x {size} products of {precision}, measured"


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Metrics:
    """Appends to metrics.jsonl; on the first rank only, elsewhere it does nothing.

    A run that resumes at step N drops what was written after it, so that a step stands in the file once.
    """

    def __init__(self, folder: Path, write: bool) -> None:
        self.file, self.write = folder / METRICS_FILE, write
        self._stream: Any = None

    def open(self, header: dict[str, Any], after_step: int) -> None:
        """Begin, keeping the lines up to a step."""
        if not self.write:
            return
        kept = [line for line in read(self.file) if "step" in line and line["step"] <= after_step]
        kept = [line for line in kept if "final" not in line] if after_step else []
        fresh = self.file.with_suffix(".part")
        with fresh.open("w", encoding="utf-8") as stream:
            for line in [header, *kept]:
                stream.write(_line(line))
        os.replace(fresh, self.file)
        self._stream = self.file.open("a", encoding="utf-8")

    def add(self, **values: Any) -> None:
        """One line, at once in the file."""
        if self._stream is not None:
            self._stream.write(_line(values))
            self._stream.flush()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that a kill has cut is left out, and no file has no lines."""
    if not file.is_file():
        return []
    lines = []
    for text in file.read_text("utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def _line(values: dict[str, Any]) -> str:
    return json.dumps({key: _finite(value) for key, value in values.items()}) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no word for NaN and infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
