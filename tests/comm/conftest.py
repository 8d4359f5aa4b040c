from collections.abc import Callable
from typing import Any

import pytest

from lindos.comm.ranks import Ranks, threads


@pytest.fixture
def run(ranks: Ranks) -> Callable[..., list[Any]]:
    """`run(transport, job, size, *arguments)` on processes or threads."""

    def on(transport: str, job: Callable[..., Any], size: int, *arguments: Any, **options: Any) -> list[Any]:
        if transport == "threads":
            return threads(job, size, *arguments, **options)
        return ranks.run(job, size, *arguments, transport=transport, **options)

    return on
