"""The sentence that the whole system speaks: a plan applied to a model, pass by pass."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lindos.booster.blocks import Block, blocks_of
from lindos.booster.compiled import refuse_without_compiler, stop_at_collectives
from lindos.booster.plugins import Plugin
from lindos.booster.precision import Precision
from lindos.booster.recompute import Recompute
from lindos.comm.world import World
from lindos.core.errors import InputError, LindosError, RefusedError
from lindos.core.layout import Layout
from lindos.core.ledger import Entry, Ledger
from lindos.core.mesh import Mesh
from lindos.core.rules import Rules
from lindos.core.units import text_of_bytes
from lindos.hf import proven
from lindos.hf import rules as hf_rules
from lindos.hf.initial import initial_values
from lindos.hf.load import Folder
from lindos.hf.models import persistent_buffers
from lindos.memory.homes import Homes
from lindos.optim import optimizer as optim
from lindos.parallel import products
from lindos.parallel.data.program import Data
from lindos.parallel.tensor.kind import Tensor
from lindos.parallel.whole import place, take

LARGEST_WHOLE = 0.5  # share of the parameters inside the blocks that tensor parallelism may leave whole unasked


@dataclass
class Plan:
    """A model under a plan: what the booster runs.

    Attributes:
        ledger: how every tensor lies.
        world: this process on the plan's mesh.
        tensor: the tensor axis, with what its forwards share.
        data: the chunk program.
        names: parameter name by the identity of what the user gave.
        recompute: what blocks keep for backward; None where they are left as they are.
    """

    ledger: Ledger
    world: World
    tensor: Tensor | None
    data: Data
    names: dict[int, str]
    recompute: Recompute | None = None


def compose(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plugin: Plugin,
    precision: Precision,
    link: World,
    allow: tuple[str, ...] = (),
) -> Plan:
    """Apply a plan to a model in place; every refusal comes before the first change.

    Communicates: three exchanges through the store; no collective.

    Raises:
        LindosError: on all ranks alike.
    """
    mesh = plugin.mesh(link.size, link.rank)
    world = link.on(mesh)
    data = Data(precision.dtypes, world.device, plugin.zero, plugin.zero_replicas)
    plan: Plan | None = None
    error: LindosError | None = None
    try:
        names, tied = _names(model)
        trained = optim.check(optimizer, names, plugin.zero > 0) if optimizer is not None else None
        # 1. the ledger, on shapes alone
        ledger = ledger_of(model, tied, trained)
        # 2. rules: read from the model, or written
        tensor = _tensor(model, plugin) if mesh.size("tp") > 1 else None
        # 3. each axis writes its columns
        mesh = tensor.contribute(ledger, mesh) if tensor else mesh
        if tensor:
            _check_rules(model, plugin, mesh, tensor, ledger, "whole" in allow)
        mesh = data.contribute(ledger, mesh)
        folder = _folder(model, ledger)
        blocks = _blocks(model, plugin, world.device)
        plan = Plan(ledger, link.on(mesh), tensor, data, names)
    except LindosError as found:
        error = found
    world.agree(error, "boost")
    assert plan is not None
    # 4. all ranks hold the same weights and mean the same plan
    _compare_weights(model, world)
    _compare(plan.ledger.digest(), world, "the plan, the model or the optimizer differs between ranks")
    # 5. forwards of roles, then of blocks; then parameters into chunks
    old = dict(model.named_parameters())
    sources = _initial(model, folder, plan) if any(p.is_meta for p in old.values()) else iter(())
    _forwards(model, plugin, plan, blocks, precision.name == "bf16")
    data.apply(model, plan.ledger, plan.world)
    # 6. values: those that were there, then those of a folder or of the model's own rule
    for name, value in itertools.chain(((n, p.detach()) for n, p in old.items() if not p.is_meta), sources):
        _fill(plan, name, value)
    if folder is not None:
        _read_buffers(model, folder)
    _move_buffers(model, plan.world.device)
    inner = plan.tensor.finish(model, plan.world) if plan.tensor else []
    plan.world.prepare([plan.world.all, "dp", "tp", ("dp", "sp"), *inner, *data.groups()])
    # 7. the optimizer steps this rank's shards
    if optimizer is not None:
        optim.spread(optimizer, names, data.shards)
    return plan


def _names(model: nn.Module) -> tuple[dict[int, str], dict[str, tuple[str, ...]]]:
    """Name by identity, and the other names of tied parameters."""
    names: dict[int, str] = {}
    tied: dict[str, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            tied[first] = (*tied.get(first, ()), name)
    if not names:
        raise InputError("the model has no parameters.")
    return names, tied


def ledger_of(
    model: nn.Module, tied: dict[str, tuple[str, ...]] | None = None, trained: set[str] | None = None
) -> Ledger:
    """A line for every parameter and buffer, whole. Reads shapes alone."""
    tied = _names(model)[1] if tied is None else tied
    ledger = Ledger()
    for name, parameter in model.named_parameters():
        layout = Layout(tuple(parameter.shape))
        dtype = str(parameter.dtype).removeprefix("torch.")
        wanted = parameter.requires_grad and (trained is None or name in trained)
        if parameter.requires_grad is False and trained is not None and name in trained:
            wanted = False
        ledger.add(Entry(name, "parameter", "whole", dtype, layout, layout, tied=tied.get(name, ()), trained=wanted))
    for name, buffer in model.named_buffers():
        layout = Layout(tuple(buffer.shape))
        ledger.add(
            Entry(name, "buffer", "whole", str(buffer.dtype).removeprefix("torch."), layout, layout, trained=False)
        )
    return ledger


def _blocks(model: nn.Module, plugin: Plugin, device: torch.device) -> list[Block]:
    """The blocks, where an option asks for them."""
    asked = [f for f in ("recompute", "compile", "activations") if getattr(plugin, f) != getattr(Plugin(), f)]
    if not asked:
        return []
    if plugin.compile:
        refuse_without_compiler(device)
    return blocks_of(model, f"{asked[0]}={getattr(plugin, asked[0])!r}")


def _forwards(model: nn.Module, plugin: Plugin, plan: Plan, blocks: list[Block], bf16: bool) -> None:
    """Roles, recompute, then compile: frames around the blocks, compiled code inside the frames."""
    if plan.tensor:
        plan.tensor.apply(model, plan.ledger, plan.world)
    if bf16 and plan.world.device.type == "cpu" and products.emulated():
        products.install(model)
    if not blocks:
        return
    homes = Homes(plan.world.device) if plugin.activations == "host" else None
    plan.recompute = Recompute(model, plugin.recompute, homes, plan.world)
    plan.recompute.install(blocks)
    if plugin.compile:
        stop_at_collectives(plan.tensor.crossing if plan.tensor else None, len(blocks))
        plan.recompute.compile()


def _tensor(model: nn.Module, plugin: Plugin) -> Tensor:
    rules = Rules.read(plugin.rules) if plugin.rules is not None else hf_rules.rules_of(model, plugin.tp)
    return Tensor(rules, plugin.tensor).read(model, plugin.tp)


def _check_rules(model: nn.Module, plugin: Plugin, mesh: Mesh, tensor: Tensor, ledger: Ledger, whole: bool) -> None:
    """Inferred rules must be proven, and must cut most of the model.

    Raises:
        RefusedError: they are not, or do not.
    """
    _refuse_kernels(tensor)
    if plugin.rules is None and not plugin.unproven:
        proven.check(model, tensor.rules, tensor.heads, {axis.name: axis.size for axis in mesh.base})
    left, inner = tensor.left_bytes(ledger), tensor.inner_bytes(ledger)
    if sum(left.values()) > LARGEST_WHOLE * inner and not whole:
        names = ", ".join(f"{name} ({text_of_bytes(size)})" for name, size in list(left.items())[:4])
        raise RefusedError(
            f"tp={plugin.tp} would leave {sum(left.values()) / inner:.0%} of the model's inner parameters whole on "
            f"every rank, more than {LARGEST_WHOLE:.0%}: {names}. Write rules (docs/rules.md), use other axes, or "
            'accept it with Booster(allow=("whole",)).'
        )


KERNELS = ("mamba_ssm", "causal_conv1d", "fla", "kernels")  # packages whose fused mixers read weights by themselves


def _refuse_kernels(tensor: Tensor) -> None:
    """
    Raises:
        RefusedError: a mixer would run as one fused kernel, whose output nobody sums over tp.
    """
    fused = {"convolution", "group_norm", "whole_output"} & {rule.role for rule in tensor.resolved.values()}
    found = (
        [name for name in KERNELS if importlib.util.find_spec(name)]
        if fused and torch.accelerator.is_available()
        else []
    )
    if found:
        raise RefusedError(
            f"{', '.join(found)} would run this model's mixers as fused kernels that read their weights by themselves, "
            "past the sums over tp. Uninstall it, or use tp=1."
        )


def _folder(model: nn.Module, ledger: Ledger) -> Folder | None:
    path = model.__dict__.get("_lindos_folder")
    if path is None:
        return None
    folder = Folder(path, model)
    shapes = {entry.name: entry.shape for entry in ledger.of("parameter")}
    folder.check(shapes, shapes)
    return folder


def _initial(
    model: nn.Module, folder: Folder | None, plan: Plan
) -> Iterator[tuple[str, torch.Tensor | list[torch.Tensor]]]:
    """Values for parameters on meta; computed before their modules are changed, one unit at a time."""
    if folder is None:
        return initial_values(model, plan.world.seed)
    entries = list(plan.ledger.of("parameter"))
    return ((e.name, folder.read(e.name, e.at_rest.boxes(plan.world.mesh))) for e in entries)


def _fill(plan: Plan, name: str, value: torch.Tensor | list[torch.Tensor]) -> None:
    entry = plan.ledger.parameter(name)
    out = torch.zeros(
        entry.at_rest.local_shape(plan.world.mesh), dtype=torch.float32 if isinstance(value, list) else value.dtype
    )
    if isinstance(value, list):
        for part, box in zip(value, entry.at_rest.boxes(plan.world.mesh)):
            place(part.to(out.dtype), box, out)
    elif entry.at_rest.cuts:
        take(value.to("cpu"), entry.at_rest, plan.world, out)
    else:
        out = value
    plan.data.fill(entry.name, out)


def _read_buffers(model: nn.Module, folder: Folder) -> None:
    """Persistent buffers are part of a folder's weights: router corrections, running statistics."""
    for name, buffer in persistent_buffers(model).items():
        buffer.copy_(folder.read(name))  # type: ignore[arg-type]


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _compare(digest: str, world: World, what: str) -> None:
    if len(set(world.exchange(digest, "digest"))) > 1:
        raise InputError(f"{what}. Every rank must run the same script with the same options.")


def _compare_weights(model: nn.Module, world: World) -> None:
    """A checksum of every tensor over ranks; the first that differs is named."""
    if world.size == 1:
        return
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    sums = {name: checksum(tensor) for name, tensor in tensors.items() if not tensor.is_meta}
    if not sums:
        return
    everyone = world.exchange(sums, "weights")
    for name in sums:
        ranks = [rank for rank, theirs in enumerate(everyone) if theirs.get(name) != everyone[0].get(name)]
        if ranks:
            raise InputError(
                f"the weights of {name!r} on rank {ranks[0]} differ from those on rank 0. All ranks must start "
                f"from the same "
                "model: seed before you build it (torch.manual_seed), or build it under lindos.lazy()."
            )


def checksum(tensor: torch.Tensor) -> list[int]:
    """Two sums over the bits of a tensor, one of them weighted by position."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype == torch.bool or flat.element_size() < 4:
        flat = flat.to(torch.float32 if flat.is_floating_point() else torch.int32)
    words = flat.view(torch.int32)
    plain = weighted = 0
    for start in range(0, words.numel(), 1 << 22):
        piece = words[start : start + (1 << 22)].long()
        plain += int(piece.sum())
        weighted += int((piece * (torch.arange(piece.numel(), device=piece.device) % 8191 + start % 8191 + 1)).sum())
    return [plain, weighted]
