"""Plugins: the plan as the user writes it. One frozen dataclass; the four names fill different fields of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lindos.core.errors import InputError, RefusedError, nearest
from lindos.core.mesh import Mesh

CHOICES = {
    "tensor": ("1d", "2d", "2.5d", "3d"),
    "sequence": ("ulysses", "ring", "ring_self_attention", "split_gather"),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero_bubble_v", "dual_pipe_v"),
    "placement": ("none", "auto", "static"),
    "recompute": ("none", "full", "selective"),
    "activations": ("device", "host"),
}


@dataclass(frozen=True)
class Plugin:
    """A plan: axes and options.

    Attributes:
        name: the plugin's name, for messages.
        tp, pp, sp: sizes of the tensor, pipeline and sequence axes; dp is what is left of the world.
        zero: zero_stage, 0 to 3.
        zero_replicas: shard inside groups and replicate over this many of them.
        tensor: tensor-parallel algorithm.
        sequence: sequence-parallel kind, or a pair of a tp kind with an sp kind.
        schedule: of the pipeline.
        recompute: what of each block is computed again in backward: "none", "full", "selective" or a budget in bytes.
        compile: torch.compile each block.
        activations: where what blocks save for backward rests, "device" or "host".
        rules: a file, mapping or Rules that override what is read from the model.
        unproven: run inferred rules that no proof has covered.
        placement: "none" keeps all state on the device; "auto" and "static" are Gemini's.
        ep: expert axis, reserved.
    """

    name: str = "DDP"
    tp: int = 1
    pp: int = 1
    sp: int = 1
    zero: int = 0
    zero_replicas: int = 1
    tensor: str = "1d"
    sequence: Any = "ulysses"
    schedule: str = "1f1b"
    recompute: Any = "none"
    compile: bool = False
    activations: str = "device"
    rules: Any = None
    unproven: bool = False
    placement: str = "none"
    device_budget: Any = "auto"
    host_budget: Any = "auto"
    disk: str | Path | None = None
    host_fraction: float = 0.0
    disk_fraction: float = 0.0
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "sp", "ep", "zero_replicas"):
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise InputError(f"{self.name}({axis}=...) must be an integer of at least 1; got {size!r}.")
        if self.zero not in (0, 1, 2, 3):
            raise InputError(f"{self.name}(zero=...) is a zero_stage, 0, 1, 2 or 3; got {self.zero!r}.")
        for field in ("tensor", "schedule", "placement", "activations"):
            _choose(self.name, field, getattr(self, field))
        kinds = self.sequence if isinstance(self.sequence, tuple | list) else (self.sequence,)
        for kind in kinds:
            _choose(self.name, "sequence", kind)
        self._check_blocks()

    def _check_blocks(self) -> None:
        """What is done to each block: recompute and compile."""
        if isinstance(self.recompute, bool) or not isinstance(self.recompute, int | str):
            raise InputError(
                f"{self.name}(recompute=...) is 'none', 'full', 'selective' or a budget, an integer of bytes; "
                f"got {self.recompute!r}."
            )
        if isinstance(self.recompute, str):
            _choose(self.name, "recompute", self.recompute)
        elif self.recompute < 1:
            raise InputError(f"{self.name}(recompute=...) as a budget must be at least 1 byte; got {self.recompute}.")
        if not isinstance(self.compile, bool):
            raise InputError(f"{self.name}(compile=...) must be True or False; got {self.compile!r}.")
        if self.compile and self.recompute not in ("none", "full"):
            raise RefusedError(
                f"{self.name}(compile=True, recompute={self.recompute!r}): a compiled block does not show its "
                "operations, so none can be chosen. Use recompute='full' or 'none', or compile=False."
            )

    def refuse_unserved(self) -> None:
        """Options of the contract that this version does not serve are refused by name, before any work.

        Raises:
            RefusedError: names the option.
        """
        default = Plugin()
        unserved = {
            "ep": "expert parallelism",
            "pp": "pipeline parallelism",
            "sp": "sequence parallelism",
            **({"zero": "sharded parameters"} if self.zero == 3 else {}),
            "tensor": "multi-dimensional tensor parallelism",
            "sequence": "sequence parallelism",
            "schedule": "pipeline parallelism",
            "placement": "Gemini",
            "device_budget": "Gemini",
            "host_budget": "Gemini",
            "disk": "Gemini",
            "host_fraction": "Gemini",
            "disk_fraction": "Gemini",
        }
        for field, what in unserved.items():
            value = getattr(self, field)
            if value != getattr(default, field):
                raise RefusedError(
                    f"{self.name}({field}={value!r}): {what} is not served yet. Leave {field} at its default."
                )

    def mesh(self, world_size: int, rank: int | None = None) -> Mesh:
        """The mesh pp x dp x sp x tp, tp innermost so that it stays inside a host.

        Raises:
            InputError: the axes do not divide the world; lists the sizes that work.
        """
        inner = self.tp * self.pp * self.sp
        if world_size % inner:
            sizes = sorted({t for t in range(1, world_size + 1) if world_size % (t * self.pp * self.sp) == 0})
            raise InputError(
                f"tp x pp x sp = {self.tp} x {self.pp} x {self.sp} = {inner} must divide the world of "
                f"{world_size} ranks. "
                + (f"With these pp and sp, tp in {sizes} works." if sizes else f"Use a world of a multiple of {inner}.")
            )
        return Mesh.of(rank, pp=self.pp, dp=world_size // inner, sp=self.sp, tp=self.tp)


def _choose(name: str, field: str, value: Any) -> None:
    if value not in CHOICES[field]:
        raise InputError(f"{name}({field}={value!r}): {nearest(str(value), CHOICES[field])}.")


def _made(name: str, fields: dict[str, Any], given: dict[str, Any]) -> Plugin:
    known = [field.name for field in dataclasses.fields(Plugin) if field.name != "name"]
    for key in given:
        if key not in known:
            raise InputError(f"{name} has no option {key!r}: {nearest(key, known)}.")
    return Plugin(name=name, **{**fields, **given})


def DDP(**axes: Any) -> Plugin:
    """Replicate over dp: every rank holds all parameters, gradients and optimizer state."""
    return _made("DDP", {}, axes)


def LowLevelZero(stage: int = 1, **axes: Any) -> Plugin:
    """Shard optimizer state over dp (stage 1), gradients too (stage 2).

    Raises:
        InputError: another stage.
    """
    if stage not in (1, 2):
        raise InputError(
            f"LowLevelZero(stage=...) is 1 or 2; got {stage!r}. Stage 3 is Gemini or HybridParallel(zero=3)."
        )
    return _made("LowLevelZero", {"zero": stage}, axes)


def Gemini(placement: str = "auto", zero: int = 3, **options: Any) -> Plugin:
    """State in chunks that rest on device, host or disk; parameters sharded too at zero=3."""
    return _made("Gemini", {"placement": placement, "zero": zero}, options)


def HybridParallel(tp: int = 1, pp: int = 1, sp: int = 1, zero: int = 0, **options: Any) -> Plugin:
    """Any mix of axes: dp is the world divided by tp x pp x sp."""
    return _made("HybridParallel", {"tp": tp, "pp": pp, "sp": sp, "zero": zero}, options)
