"""Pretraining: corpus, model, boost, then a loop over the loader until the budget of tokens is spent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lindos import corpus
from lindos.core.errors import CheckpointError, DataError
from lindos.core.units import text_of_count
from lindos.train import assembly, data, folder, metrics, progress
from lindos.train.config import Config, Steps, plugin_of, steps_of
from lindos.train.reading import written
from lindos.train.stop import EXIT_STOPPED, StopRequests


@dataclass
class Run:
    """A run that is ready to step."""

    config: Config
    world: Any
    steps: Steps
    say: Callable[[str], None]
    corpus: Path
    validation: corpus.TokenRows
    booster: Any
    model: Any
    loader: Any
    metrics: metrics.Metrics
    sizes: tuple[int, int, int]
    step: int = 0
    saved: int = -1
    flops_per_token: float = 0.0
    peak_flops: float = 0.0
    evaluated: dict[int, float] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return Path(self.config.run)


def pretrain(config: Config, world: Any, say: Callable[[str], None]) -> int:
    """Trains as the configuration says and returns the command line's exit code.

    Args:
        config: of the run.
        world: as `lindos.launch` gave it.
        say: prints a line; called on the first rank only.

    Returns:
        0 when every step was done, 75 when a signal asked to stop and the state was saved.

    Raises:
        LindosError: on all ranks. Checkpoints that were written stay.
    """
    tell = say if world.rank == 0 else lambda text: None
    stop = StopRequests(world)
    with stop.heard():
        run = _ready(config, world, tell, stop)
        if run is None:
            tell("stopped before the first step; nothing was saved, --resume auto begins anew")
            return EXIT_STOPPED
        try:
            if not _train(run, stop):
                tell(f"stopped after step {run.step} of {run.steps.total}, saved; --resume auto continues")
                return EXIT_STOPPED
            _finish(run)
        finally:
            run.metrics.close()
    return 0


def _ready(config: Config, world: Any, tell: Callable[[str], None], stop: StopRequests) -> Run | None:
    """Everything up to the first step; None where a stop was asked for."""
    at = Path(config.run)
    _agreed(world, "run folder", lambda: folder.prepare(at, config.train.resume) if world.rank == 0 else None)
    shards = data.prepared(config, world, tell, lambda: stop.asked)
    if shards is None:
        return None
    run = _agreed(world, "model and data", lambda: _assemble(config, world, tell, shards))
    if world.rank == 0:
        (at / folder.CONFIG_FILE).write_text(written(config), "utf-8")
    model, optimizer, scheduler = run.model
    run.model, _, run.loader, _ = run.booster.boost(model, optimizer, run.loader, scheduler)
    tell(run.booster.describe())
    _resume(run)
    _measure(run)
    return None if stop.now() and run.step == 0 else run


def _agreed(world: Any, name: str, work: Callable[[], Any]) -> Any:
    """Work of every rank; an error of one is raised by all."""
    result, error = None, None
    try:
        result = work()
    except Exception as found:
        error = found
    world.agree(error, name)
    return result


def _assemble(config: Config, world: Any, tell: Callable[[str], None], shards: Path) -> Run:
    import lindos

    steps = steps_of(config, world.size)
    train = corpus.TokenRows(shards, "train", config.data.sequence)
    validation = corpus.TokenRows(shards, "validation", config.data.sequence)
    tokenizer = corpus.load(assembly.tokenizer_folder(shards))
    booster = lindos.Booster(
        plugin_of(config.parallel),
        precision=config.train.precision,
        max_norm=config.optim.max_norm,
        micro_batches=steps.micro_batches,
    )
    model = assembly.model_of(config.model, tokenizer, config.data.sequence)
    sizes = metrics.sizes_of(model)
    optimizer = assembly.adamw(model, config.optim)
    scheduler = assembly.scheduler_of(optimizer, config.optim, steps.total)
    tell(
        f"{type(model).__name__}, {text_of_count(sizes[0])} parameters, {len(train)} rows of {config.data.sequence} "
        f"tokens, {steps.total} steps of {text_of_count(steps.tokens)} tokens on {world.size} ranks"
    )
    if world.rank == 0:
        facts = {"corpus": train.fingerprint, "sequence": config.data.sequence, "tokens_a_step": steps.tokens}
        folder.compare(Path(config.run), {**facts, "seed": config.train.seed}, config.train.resume != "never")
    return Run(
        config=config,
        world=world,
        steps=steps,
        say=tell,
        corpus=shards,
        validation=validation,
        booster=booster,
        model=(model, optimizer, scheduler),
        loader=data.loader_of(train, steps.rows),
        metrics=metrics.Metrics(Path(config.run), world.rank == 0),
        sizes=sizes,
    )


def _resume(run: Run) -> None:
    """Loads the newest checkpoint that can be loaded."""
    resume, at = run.config.train.resume, run.folder
    found, passed = _agreed(run.world, "checkpoints", lambda: folder.candidates(at, resume))
    found = run.world.exchange([[step, str(path)] for step, path in found], "checkpoints")[0]
    for text in passed:
        run.say(text)
    for step, path in found:
        try:
            run.booster.load(path)
        except CheckpointError as error:
            if resume != "auto" or [step, path] == found[-1]:
                raise
            run.say(f"passed over {path}: {error}")
            continue
        run.step = run.saved = step
        run.say(f"continues after step {step}, from {path}")
        return


def _measure(run: Run) -> None:
    """The yardstick of mfu, and the head of metrics.jsonl."""
    config, (parameters, layers, hidden) = run.config, run.sizes
    flops, source = metrics.peak_flops(run.world.device, config.train.precision)
    run.peak_flops = sum(run.world.exchange(flops, "peak flops"))
    run.flops_per_token = metrics.flops_per_token(parameters, layers, hidden, config.data.sequence)
    header = {
        "header": "a line a step; loss in nats a token, seconds of the step alone",
        "formula": metrics.MFU_FORMULA,
        "parameters": parameters,
        "layers": layers,
        "hidden": hidden,
        "sequence": config.data.sequence,
        "flops_per_token": run.flops_per_token,
        "peak_flops": run.peak_flops,
        "peak_source": f"{source}, on each of {run.world.size} ranks",
        "unigram_entropy": run.validation.unigram_entropy,
        "steps": run.steps.total,
        "ranks": run.world.size,
    }
    run.metrics.open(header, run.step)


def _train(run: Run, stop: StopRequests) -> bool:
    """Steps until the budget is spent, or a stop is agreed on; whether all were done."""
    total, every = run.steps.total, run.config.train
    with progress.shown(run.say, run.world.rank == 0, total, every.log_every) as bar:
        while run.step < total:
            before, batches = run.step, iter(run.loader)  # the rest of an epoch
            while run.step < total:
                started = time.perf_counter()
                batch = next(batches, None)
                if batch is None:
                    break
                _step(run, batch, started, bar)
                if stop.after(run.step) and run.step < total:
                    _save(run)
                    return False
                if every.evaluate_every and run.step % every.evaluate_every == 0 and run.step < total:
                    bar.note(_evaluated_text(run))
                if run.step == total or (every.save_every and run.step % every.save_every == 0):
                    _save(run)
            if run.step == before:
                raise DataError(f"an epoch must have a batch for step {run.step + 1}, got none. Give more text.")
    return True


def _step(run: Run, batch: Any, started: float, bar: Any) -> None:
    out = run.booster.step(batch)
    loss, norm = float(out.loss), float(out.grad_norm)
    seconds = time.perf_counter() - started
    run.step += 1
    rate = run.steps.tokens / seconds
    values = {
        "step": run.step,
        "loss": loss,
        "grad_norm": norm,
        "lr": _rate(out.lr),
        "tokens": run.step * run.steps.tokens,
        "tokens_per_second": rate,
        "mfu": rate * run.flops_per_token / run.peak_flops,
        "seconds": seconds,
        "skipped": bool(out.skipped),
    }
    run.metrics.add(**values)
    bar.step(values)


def _rate(lr: Any) -> float:
    return float(lr[0] if isinstance(lr, list | tuple) else lr)


def _evaluate(run: Run) -> float:
    """The validation loss after this step, nats a token."""
    if run.step not in run.evaluated:
        dp = run.booster.mesh.size("dp")
        place = run.booster.mesh.coordinate("dp")
        batches = data.validation_batches(run.validation, run.steps.rows, dp, place)
        result = run.booster.evaluate(batches)
        run.evaluated[run.step] = float(result.loss)
        run.metrics.add(step=run.step, validation_loss=float(result.loss), count=int(result.count))
    return run.evaluated[run.step]


def _evaluated_text(run: Run) -> str:
    loss, entropy = _evaluate(run), run.validation.unigram_entropy
    return f"step {run.step}: validation loss {loss:.4f}, unigram entropy {entropy:.4f}, {entropy - loss:.2f} under it"


def _save(run: Run) -> None:
    """A checkpoint of this step, unless it is already there."""
    if run.saved == run.step:
        return
    target = folder.checkpoint(run.folder, run.step)
    _agreed(run.world, "room for a checkpoint", lambda: folder.set_aside(target) if run.world.rank == 0 else None)
    run.booster.save(str(target))
    run.saved = run.step
    if run.world.rank == 0:
        folder.drop_old(run.folder, run.config.train.keep)


def _finish(run: Run) -> None:
    """Validation, export and a sample text."""
    from lindos.hf import models

    run.say(_evaluated_text(run))
    tokenizer = models.load_tokenizer(assembly.tokenizer_folder(run.corpus))
    log, sample = run.config.log, None
    if log.sample_tokens and run.config.parallel.pp == 1:
        sample = _sample(run, tokenizer)
        run.say(f"sample: {sample!r}")
    elif log.sample_tokens:
        run.say("no sample text: the stages of a pipeline cannot be called one token at a time")
    if log.export:
        target = run.folder / folder.MODEL_FOLDER
        _agreed(run.world, "room for the export", lambda: folder.remove(target) if run.world.rank == 0 else None)
        run.booster.export(str(target), tokenizer=tokenizer)
        run.say(f"exported to {target}")
    run.metrics.add(
        step=run.step,
        final=True,
        validation_loss=_evaluate(run),
        unigram_entropy=run.validation.unigram_entropy,
        sample=sample,
    )


def _sample(run: Run, tokenizer: Any) -> str:
    from lindos.hf import generate

    log = run.config.log
    prompt = log.sample_prompt or tokenizer.decode(run.validation[0]["input_ids"][:8].tolist())
    return generate.sample(
        run.model, tokenizer, prompt, log.sample_tokens, run.config.train.seed, log.sample_temperature
    )
