"""Recipes: configurations by name, with where their numbers come from."""

from __future__ import annotations

from collections.abc import Callable

from lindos.core.errors import InputError, nearest
from lindos.train.config import Config, Data, Log, Model, Optim, Train


def llama_demo() -> Config:
    """A small Llama on Python's standard library: minutes on two CPU cores, no download.

    Rate and batch keep the run calm: rounding that differs between plans stays below 1e-5 of the loss for hundreds of
    steps, where half the batch at 3e-3 lets it grow to 1e-2.
    """
    return Config(
        run="run/llama-demo",
        model=Model(type="llama", hidden=128, layers=2, heads=4, intermediate=384, tied=False),
        data=Data(path=("stdlib",), tokenizer=2048, sequence=128),
        train=Train(tokens=819_200, batch_tokens=2048, evaluate_every=200, save_every=200, keep=2, log_every=50),
        optim=Optim(lr=2e-3, warmup_share=0.1),
        log=Log(sample_prompt="class", sample_tokens=96),
    )


def _llama(size: str, hidden: int, layers: int, heads: int, intermediate: int, lr: float, tokens: int) -> Config:
    """One of the first LLaMA models.

    Sizes, rates and tokens: Touvron et al., LLaMA, arXiv 2302.13971, tables 2 and section 2.3. The paper says neither
    the feed-forward width of each size (2/3 of 4d, rounded up to a multiple of 256, as released) nor what is not
    decayed.
    """
    return Config(
        run=f"run/llama-{size}",
        model=Model(
            type="llama",
            hidden=hidden,
            layers=layers,
            heads=heads,
            intermediate=intermediate,
            vocabulary=32_000,
            positions=2048,
            tied=False,
            options=("rms_norm_eps=1e-6",),
        ),
        data=Data(path=("corpus",), tokenizer=32_000, sequence=2048, validation_fraction=0.001),
        train=Train(
            tokens=tokens,
            batch_tokens=2048 * 2048,  # "a batch size of 4M tokens"
            micro_rows=1,
            precision="bf16",
            evaluate_every=1000,
            save_every=1000,
            keep=3,
        ),
        optim=Optim(
            lr=lr, min_lr_ratio=0.1, warmup_steps=2000, betas=(0.9, 0.95), weight_decay=0.1, max_norm=1.0
        ),
    )  # fmt: skip


def llama_7b() -> Config:
    """LLaMA 7B: 6.7 G parameters, 1.0 T tokens."""
    return _llama("7b", 4096, 32, 32, 11_008, 3.0e-4, 10**12)


def llama_13b() -> Config:
    """LLaMA 13B: 13.0 G parameters, 1.0 T tokens."""
    return _llama("13b", 5120, 40, 40, 13_824, 3.0e-4, 10**12)


def llama_30b() -> Config:
    """LLaMA 33B, called 30B in its release: 32.5 G parameters, 1.4 T tokens."""
    return _llama("30b", 6656, 60, 52, 17_920, 1.5e-4, 14 * 10**11)


def llama_65b() -> Config:
    """LLaMA 65B: 65.2 G parameters, 1.4 T tokens."""
    return _llama("65b", 8192, 80, 64, 22_016, 1.5e-4, 14 * 10**11)


RECIPES: dict[str, Callable[[], Config]] = {
    "llama-demo": llama_demo,
    "7b": llama_7b,
    "13b": llama_13b,
    "30b": llama_30b,
    "65b": llama_65b,
}


def recipe(name: str) -> Config:
    """The configuration of a recipe.

    Raises:
        InputError: no such recipe; names the nearest.
    """
    made = RECIPES.get(name) or RECIPES.get(name.removeprefix("llama-"))
    if made is None:
        raise InputError(f"there is no recipe {name!r}: {nearest(name, RECIPES)}.")
    return made()
