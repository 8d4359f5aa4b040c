"""lindos: train, fine-tune and serve large models on any hardware, with proof that the numbers are right.

lindos.launch()                                    one process, torchrun, Slurm or mpirun
with lindos.lazy(): model = ...                    no memory until the plan is known
booster = lindos.Booster(lindos.HybridParallel(tp=2))
model, optimizer, loader, scheduler = booster.boost(model, optimizer, loader, scheduler)
for batch in loader: booster.step(batch)
"""

from typing import Any

from lindos.booster.booster import Booster
from lindos.booster.lazy import from_pretrained, lazy
from lindos.booster.loss import per_token
from lindos.booster.plugins import DDP, Gemini, HybridParallel, LowLevelZero
from lindos.comm.launch import launch
from lindos.core import errors

__all__ = [
    "DDP",
    "Booster",
    "Gemini",
    "HybridParallel",
    "LowLevelZero",
    "errors",
    "from_pretrained",
    "launch",
    "lazy",
    "per_token",
    "prove",
]
__version__ = "0.1.0"


def prove(*args: Any, **options: Any) -> Any:
    """Train a model under a plan and in one process, and compare every number. See `lindos.proof.prove`."""
    from lindos.proof import prove as run

    return run(*args, **options)
