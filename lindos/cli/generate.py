"""`lindos generate`: continue a text with a model folder or a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lindos.cli.arguments import Parser, count, taken
from lindos.core.errors import DataError, InputError, RefusedError


def main(arguments: Sequence[str]) -> int:
    """Prints the continuation of each prompt; with --nproc on several ranks that split the model."""
    ranks, rest = taken(arguments, "--nproc")
    number = count(ranks, "--nproc")
    given = _parser().read(rest)
    _check(given)  # a mistake is found once, before any rank starts
    if number is not None and number > 1:
        from lindos.cli.ranks import start

        return start([sys.executable, "-m", "lindos", "generate", *rest], number)
    return _rank(given)


def _parser() -> Parser:
    parser = Parser(prog="lindos generate", description="Continue a text with a model folder or a checkpoint.")
    parser.add_argument("folder", help="Hugging Face folder, RUN/step-N, or RUN for its newest checkpoint")
    parser.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    parser.add_argument("--max-tokens", "--max_tokens", type=int, default=64, help="most tokens to make (64)")
    parser.add_argument("--temperature", type=float, default=None, help="0 takes the likeliest token (0)")
    parser.add_argument("--greedy", action="store_true", help="the likeliest token, which is the default")
    parser.add_argument("--top-k", "--top_k", type=int, default=None, help="draw among the k likeliest tokens")
    parser.add_argument("--top-p", "--top_p", type=float, default=None, help="draw among those that add up to p")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument("--stream", action="store_true", help="print as it goes")
    parser.add_argument("--chat", action="store_true", help="the prompt opens a conversation (the chat template)")
    parser.add_argument("--tp", type=int, default=None, help="tensor parallel ranks (all there are; see --nproc)")
    parser.add_argument("--rules", help="TOML file of rules, for --tp with a type that the table does not cover")
    parser.add_argument("--tokenizer", help="folder of the tokenizer (the model's)")
    parser.add_argument("--model", help="folder with config.json, for a checkpoint that is in no run's folder")
    parser.add_argument("--trust-remote-code", "--trust_remote_code", action="store_true", help="run the folder's code")
    parser.epilog = "--nproc N starts N local ranks that split the model; it needs --tp N or no --tp."
    return parser


def _check(given: argparse.Namespace) -> None:
    """
    Raises:
        InputError: no prompt, options that contradict each other or cannot be.
        RefusedError: code in the folder that nobody trusts.
    """
    if not given.prompt:
        raise InputError("lindos generate needs a --prompt.")
    if given.greedy and given.temperature:
        raise InputError(f"--greedy takes the likeliest token, got --temperature {given.temperature} too. Give one.")
    if not Path(given.folder).is_dir():
        raise InputError(f"there is no folder {given.folder}. Give a Hugging Face folder or a checkpoint.")
    _sampling(given)
    file = Path(given.folder) / "config.json"
    if given.model is not None and file.is_file():
        raise InputError(f"{given.folder} holds a model of its own (config.json): --model is for a checkpoint alone.")
    if given.rules is not None and given.trust_remote_code:
        raise InputError("--rules say how ranks split a model, and remote code is not split. Leave one of them out.")
    if file.is_file() and "auto_map" in _read(file) and not given.trust_remote_code:
        raise RefusedError(
            f"{file} names code of its own (auto_map), which would run here with all your rights. Read it, then give "
            "--trust-remote-code."
        )


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}.") from None
    return content if isinstance(content, dict) else {}


def _sampling(given: argparse.Namespace) -> Any:
    from lindos.hf.generate import Sampling

    return Sampling(given.max_tokens, given.temperature or 0.0, given.top_k, given.top_p, given.seed)


def _rank(given: argparse.Namespace) -> int:
    import lindos
    from lindos.comm.launch import leave

    world = lindos.launch(given.seed)
    if given.rules is not None and world.size == 1:
        raise InputError("--rules say how ranks split a model, and there is one rank. Give --nproc N too.")
    if given.tp not in (None, world.size):
        raise InputError(f"--tp {given.tp} needs as many ranks, got {world.size}. Give --nproc {given.tp}.")
    model, tokenizer = _trusted(given, world) if given.trust_remote_code else _opened(given, world)
    for number, prompt in enumerate(given.prompt):
        pieces = _continued(model, tokenizer, prompt, given, world)
        if world.rank > 0:
            for _ in pieces:  # every rank takes part in every token
                pass
            continue
        if len(given.prompt) > 1:
            print(f"{'' if number == 0 else chr(10)}--- {prompt}", flush=True)
        if given.stream:
            for piece in pieces:
                print(piece, end="", flush=True)
            print(flush=True)
        else:
            print("".join(pieces), flush=True)
    world.barrier("end")
    leave(world)
    return 0


def _continued(model: Any, tokenizer: Any, prompt: str, given: argparse.Namespace, world: Any) -> Iterator[str]:
    """Pieces of the continuation of one prompt."""
    from lindos.hf import generate

    ids = generate.prompt_ids(tokenizer, prompt, given.chat)
    size = model.config.get_text_config().vocab_size
    if max(ids) >= size:
        raise InputError(f"the tokenizer gives id {max(ids)}, the model has {size}: it is another model's tokenizer.")
    sampling, longest = _sampling(given), generate.positions_of(model)
    if longest is not None and len(ids) >= longest:
        raise InputError(f"a prompt must leave room in the model's {longest} positions, got {len(ids)} tokens.")
    if longest is not None and len(ids) + sampling.max_tokens > longest:
        sampling = replace(sampling, max_tokens=longest - len(ids))
        if world.rank == 0:
            print(f"note: the model has {longest} positions: at most {sampling.max_tokens} tokens.", file=sys.stderr)
    stops = generate.stops_of(model.config, tokenizer, given.folder)
    return generate.stream_text(tokenizer, generate.stream_ids(model, ids, sampling, stops))


def _opened(given: argparse.Namespace, world: Any) -> tuple[Any, Any]:
    """The model, spread over the ranks, and its tokenizer. No rank holds the whole of a model that is split."""
    import lindos
    from lindos.hf import models
    from lindos.hf.kinds import natural_kind

    folder = Path(given.folder)
    checkpoint = None
    if (folder / "config.json").is_file():
        config = models.config_of(str(folder))
        if natural_kind(config.model_type) != "causal":
            raise RefusedError(
                f"{folder} holds a {config.model_type} model, which is no causal one: only those generate."
            )
        tokenizer = models.load_tokenizer(given.tokenizer or str(folder))
        model = lindos.from_pretrained(folder)
    else:
        model, tokenizer, checkpoint = _of_checkpoint(given)
    plan = lindos.HybridParallel(tp=world.size, rules=given.rules) if world.size > 1 else lindos.DDP()
    booster = lindos.Booster(plan)
    booster.boost(model)
    if checkpoint is not None:
        booster.load(str(checkpoint), weights_only=True)
    return model, tokenizer


def _of_checkpoint(given: argparse.Namespace) -> tuple[Any, Any, Path]:
    """A model on meta, the tokenizer and the checkpoint, from a run's folder or as --model and --tokenizer say."""
    import lindos
    from lindos import corpus
    from lindos.hf import models
    from lindos.train import assembly
    from lindos.train.data import shards_of
    from lindos.train.folder import CONFIG_FILE, checkpoint_in, configuration_of

    run, checkpoint = checkpoint_in(Path(given.folder))
    if given.model is not None:
        tokenizer = models.load_tokenizer(given.tokenizer or given.model)
        with lindos.lazy():
            return models.model_of(models.config_of(given.model)), tokenizer, checkpoint
    if not (run / CONFIG_FILE).is_file():
        raise InputError(
            f"{checkpoint} lies in no run's folder (no {CONFIG_FILE} beside it), so what model it is of is not known. "
            "Give --model FOLDER, with config.json and the tokenizer."
        )
    config = configuration_of(run)
    tokens = assembly.tokenizer_folder(shards_of(config))
    model = assembly.model_of(config.model, corpus.load(tokens), config.data.sequence)
    return model, models.load_tokenizer(given.tokenizer or tokens), checkpoint


def _trusted(given: argparse.Namespace, world: Any) -> tuple[Any, Any]:
    from lindos.hf import models

    if world.size > 1:
        raise RefusedError("a model of remote code is not split over ranks. Leave --nproc and --tp out.")
    folder = given.folder
    return models.trusted_model(folder), models.load_tokenizer(given.tokenizer or folder, trusted=True)
