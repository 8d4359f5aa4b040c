"""Seeds by name: from the one number of a run a number for every purpose, equal on every rank and under every plan."""

from __future__ import annotations

import hashlib


def seed_of(seed: int, *names: str | int) -> int:
    """A 63-bit seed made of the run's seed and the name of what it is for.

    Example:
        >>> seed_of(0, "init", "model.embed_tokens") == seed_of(0, "init", "model.embed_tokens")
        True
    """
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
