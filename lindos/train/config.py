"""What a training run is made of: frozen dataclasses, one a section, every field with its unit.

A run is configured in three layers, later ones winning: a recipe, a TOML file, dotted flags. `reading.py` joins them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lindos.core.errors import InputError, nearest
from lindos.core.units import bytes_of_text

PLUGINS = ("ddp", "zero1", "zero2", "gemini_auto", "gemini_static", "hybrid")


@dataclass(frozen=True)
class Parallel:
    """How the model is spread over ranks. dp is what the other axes leave: ranks / (tp x pp x sp)."""

    plugin: Literal["ddp", "zero1", "zero2", "gemini_auto", "gemini_static", "hybrid"] = "ddp"
    """The plugin that the fields below fill."""
    tp: int = 1
    """Tensor parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    sp: int = 1
    """Sequence parallel ranks."""
    zero: int | None = None
    """ZeRO stage, 0 to 3. None: the plugin's own (zero1 1, zero2 2, gemini 3, others 0)."""
    zero_replicas: int = 1
    """Groups of dp that each hold all shards."""
    tensor: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    """Tensor parallel algorithm."""
    sequence: str = "ulysses"
    """Sequence parallel algorithm: ulysses, ring, ring_self_attention, split_gather, or two with a comma."""
    schedule: str = "1f1b"
    """Pipeline schedule."""
    recompute: int | str = "none"
    """What of each block is computed again in backward: none, full, selective, or a budget such as 8GiB or 2e9."""
    compile: bool = False
    """Compile the blocks with torch.compile."""
    activations: Literal["device", "host"] = "device"
    """Where what the blocks save for backward rests."""
    rules: str | None = None
    """TOML file of rules that override what is told from the model's structure."""
    unproven: bool = False
    """Run inferred rules that no proof has covered."""
    device_budget: str = "auto"
    """Gemini: bytes of model data on a device, such as 60GiB."""
    host_budget: str = "auto"
    """Gemini: bytes of model data in host memory, such as 200GiB."""
    disk: str | None = None
    """Gemini: folder for what memory does not hold."""
    host_fraction: float = 0.0
    """gemini_static: share of the optimizer state that rests on the host, 0 to 1."""
    disk_fraction: float = 0.0
    """gemini_static: share of the optimizer state that rests on disk, 0 to 1."""

    def axes_size(self) -> int:
        """Ranks that one copy of the data takes."""
        return self.tp * self.pp * self.sp


@dataclass(frozen=True)
class Model:
    """Which model: a folder, or a type of transformers with sizes of your own."""

    type: str = "llama"
    """Model type as transformers names it; used where no path is given."""
    path: str | None = None
    """Folder with config.json; its sizes are used unless given below."""
    from_weights: bool = False
    """Start from the weights in path instead of new ones."""
    hidden: int | None = None
    """Width of the residual stream, features."""
    layers: int | None = None
    """Number of blocks."""
    heads: int | None = None
    """Query heads of a block."""
    kv_heads: int | None = None
    """Key and value heads of a block. None: as many as heads where heads is given."""
    intermediate: int | None = None
    """Width of the feed-forward part, features."""
    vocabulary: int | None = None
    """Rows of the embedding, tokens. None: the tokenizer's, or the folder's."""
    positions: int | None = None
    """Longest sequence that the model is made for, tokens. None: data.sequence, or the folder's."""
    tied: bool | None = None
    """Whether embedding and head share one matrix. None: the type's own."""
    options: tuple[str, ...] = ()
    """Further keys of the model's configuration, each NAME=VALUE with a JSON value, such as rope_theta=500000."""


@dataclass(frozen=True)
class Data:
    """Text and how it becomes rows of tokens."""

    path: tuple[str, ...] = ("stdlib",)
    """Files, folders, .jsonl files, one corpus made by lindos data, or stdlib: Python's own standard library."""
    tokenizer: int | str = 4096
    """Folder with tokenizer.json, or the size in tokens of a byte-level BPE trained on the text."""
    sequence: int = 256
    """Length of a row, tokens."""
    validation_fraction: float = 0.01
    """Share of the documents that is only validated on, over 0 and under 1."""
    text_field: str = "text"
    """Key of the text in .jsonl files."""
    out: str | None = None
    """Folder for the token shards. None: RUN/corpus."""


@dataclass(frozen=True)
class Train:
    """How long, how much at once, and when to look and save."""

    tokens: int = 1_000_000
    """Budget, tokens; rounded up to whole steps. Epochs repeat as needed."""
    batch_rows: int = 8
    """Rows that one dp rank takes in a step."""
    batch_tokens: int | None = None
    """Tokens of a step over all ranks; replaces batch_rows and keeps the step equal under every plan."""
    micro_batches: int = 1
    """Parts of a step that a dp rank computes one after the other."""
    micro_rows: int | None = None
    """Rows of a part; replaces micro_batches."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What is computed in; masters and reductions stay fp32."""
    evaluate_every: int = 0
    """Steps between validations; 0: only at the end."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end and after a signal."""
    keep: int = 0
    """Newest checkpoints that stay on disk; 0: all."""
    log_every: int = 10
    """Steps between printed lines; metrics.jsonl has every step."""
    seed: int = 0
    """Seed of initialisation, dropout and data order."""
    resume: str = "never"
    """never, auto (the newest complete checkpoint of the run, or none), or the folder of a checkpoint."""
    timeout_seconds: float = 600
    """Limit of one collective, seconds."""


@dataclass(frozen=True)
class Optim:
    """AdamW, its schedule (linear warm-up, then cosine) and clipping."""

    lr: float = 1e-3
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Last learning rate as a share of the peak, 0 to 1."""
    warmup_steps: int | None = None
    """Steps from 0 to the peak; replaces warmup_share."""
    warmup_share: float = 0.05
    """Share of all steps from 0 to the peak, 0 to 1."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    decay_on: Literal["matrices", "matrices_and_embeddings", "all"] = "matrices"
    """What decays: matrices but embeddings, all matrices, or norms and biases too."""
    max_norm: float | None = 1.0
    """The gradient is clipped to this norm. None: it is not."""


@dataclass(frozen=True)
class Log:
    """What is written beside the metrics."""

    sample_prompt: str = ""
    """Start of the sample text at the end of the run. Empty: the first 8 tokens of the validation split."""
    sample_tokens: int = 96
    """Length of the sample, tokens; 0: none."""
    sample_temperature: float = 0.0
    """0: the likeliest token each time; 1: as the model has it."""
    export: bool = True
    """Write RUN/model in Hugging Face's format at the end."""


@dataclass(frozen=True)
class Config:
    """A training run."""

    run: str = "run"
    """Folder of the run: checkpoints, metrics.jsonl, the exported model."""
    parallel: Parallel = field(default_factory=Parallel)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    optim: Optim = field(default_factory=Optim)
    log: Log = field(default_factory=Log)


@dataclass(frozen=True)
class Steps:
    """The arithmetic of a run at a given number of ranks."""

    dp: int
    """Ranks that read different data."""
    rows: int
    """Rows that one dp rank takes in a step."""
    micro_batches: int
    """Parts of them."""
    tokens: int
    """Tokens of a step over all ranks."""
    total: int
    """Steps of the run."""


def steps_of(config: Config, ranks: int) -> Steps:
    """How many rows a rank takes and how many steps there are.

    Raises:
        InputError: sizes that do not divide, or two fields that replace each other.
    """
    train, size = config.train, config.parallel.axes_size()
    if size < 1 or ranks % size:
        return Steps(1, train.batch_rows, 1, 1, 0)  # the plugin lists the sizes that work
    dp, sequence = ranks // size, config.data.sequence
    rows = train.batch_rows
    if train.batch_tokens is not None:
        rows, left = divmod(train.batch_tokens, dp * sequence)
        if left or not rows:
            raise InputError(
                f"train.batch_tokens must be a multiple of dp x data.sequence = {dp} x {sequence} = {dp * sequence}, "
                f"got {train.batch_tokens}. Use {max(rows, 1) * dp * sequence} or {(rows + 1) * dp * sequence}."
            )
    parts = train.micro_batches
    if train.micro_rows is not None:
        if parts != 1:
            raise InputError(
                f"train.micro_rows replaces train.micro_batches, got {train.micro_rows} and {parts}. Give one of them."
            )
        parts, left = divmod(rows, train.micro_rows)
        if left or not parts:
            raise InputError(
                f"train.micro_rows must divide the {rows} rows that a rank takes in a step, got {train.micro_rows}."
            )
    tokens = rows * dp * sequence
    return Steps(dp, rows, parts, tokens, -(-train.tokens // tokens))


def check(config: Config) -> None:
    """Raises InputError where a number is out of its range."""
    rules = [
        ("train.tokens", config.train.tokens, config.train.tokens >= 1, "at least 1"),
        ("train.batch_rows", config.train.batch_rows, config.train.batch_rows >= 1, "at least 1"),
        ("train.micro_batches", config.train.micro_batches, config.train.micro_batches >= 1, "at least 1"),
        ("train.micro_rows", config.train.micro_rows, (config.train.micro_rows or 1) >= 1, "at least 1"),
        ("train.log_every", config.train.log_every, config.train.log_every >= 1, "at least 1"),
        ("train.evaluate_every", config.train.evaluate_every, config.train.evaluate_every >= 0, "0 or more"),
        ("train.save_every", config.train.save_every, config.train.save_every >= 0, "0 or more"),
        ("train.keep", config.train.keep, config.train.keep >= 0, "0 or more"),
        ("data.sequence", config.data.sequence, config.data.sequence >= 2, "at least 2"),
        ("optim.lr", config.optim.lr, config.optim.lr >= 0, "0 or more"),
        ("optim.min_lr_ratio", config.optim.min_lr_ratio, 0 <= config.optim.min_lr_ratio <= 1, "0 to 1"),
        ("optim.warmup_share", config.optim.warmup_share, 0 <= config.optim.warmup_share <= 1, "0 to 1"),
        ("optim.warmup_steps", config.optim.warmup_steps, (config.optim.warmup_steps or 0) >= 0, "0 or more"),
    ]
    for name, value, holds, must in rules:
        if not holds:
            raise InputError(f"{name} must be {must}, got {value}.")
    if config.model.from_weights and config.model.path is None:
        raise InputError("model.from_weights needs model.path, got none. Give the folder with the weights.")


def plugin_of(parallel: Parallel) -> Any:
    """The plugin that the section describes; only fields that differ from their defaults are passed on.

    Raises:
        InputError: an unknown name, or a value that the plugin does not take.
    """
    import lindos

    if parallel.plugin not in PLUGINS:
        raise InputError(f"parallel.plugin {parallel.plugin!r} is unknown: {nearest(parallel.plugin, PLUGINS)}.")
    given = {f.name: getattr(parallel, f.name) for f in fields(parallel) if f.name != "plugin"}
    given = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
    if "sequence" in given and "," in given["sequence"]:
        given["sequence"] = tuple(part.strip() for part in given["sequence"].split(","))
    for name in ("recompute", "device_budget", "host_budget"):
        if str(given.get(name, ""))[:1].isdigit():
            given[name] = bytes_of_text(given[name])
    kind, _, detail = parallel.plugin.partition("_")
    if kind in ("zero1", "zero2"):
        if "zero" in given:
            raise InputError(f"parallel.plugin {kind} says the ZeRO stage, got parallel.zero {given['zero']} too.")
        return lindos.LowLevelZero(stage=int(kind[-1]), **given)
    if kind == "gemini":
        return lindos.Gemini(placement=detail, **given)
    return (lindos.DDP if kind == "ddp" else lindos.HybridParallel)(**given)


_DEFAULTS = {f.name: f.default for f in fields(Parallel)}
