"""`lindos export`: turn a checkpoint of a run into a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lindos.cli.arguments import Parser


def main(arguments: Sequence[str]) -> int:
    """Loads the weights of CHECKPOINT in this process and writes DIR, with the tokenizer of the run."""
    parser = Parser(prog="lindos export", description="Turn a checkpoint of a run into a Hugging Face folder.")
    parser.add_argument("checkpoint", help="RUN/step-N, or RUN for its newest checkpoint")
    parser.add_argument("out", help="folder to make")
    parser.add_argument(
        "--dtype", default=None, choices=("float32", "bfloat16", "float16"), help="dtype of the weights"
    )
    given = parser.read(arguments)

    from lindos.train.folder import checkpoint_in

    run, checkpoint = checkpoint_in(Path(given.checkpoint))
    _export(run, checkpoint, given.out, given.dtype)
    print(f"exported {checkpoint} to {given.out}")
    return 0


def _export(run: Path, checkpoint: Path, out: str, dtype: str | None) -> None:
    import torch

    import lindos
    from lindos import corpus
    from lindos.hf import models
    from lindos.train import assembly
    from lindos.train.data import shards_of
    from lindos.train.folder import configuration_of

    config = configuration_of(run)
    lindos.launch(config.train.seed)
    tokens = assembly.tokenizer_folder(shards_of(config))
    model = assembly.model_of(config.model, corpus.load(tokens), config.data.sequence)
    booster = lindos.Booster()
    booster.boost(model)
    booster.load(str(checkpoint), weights_only=True)
    booster.export(out, dtype=getattr(torch, dtype) if dtype else None, tokenizer=models.load_tokenizer(tokens))
