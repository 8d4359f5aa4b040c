"""lindos: train, fine-tune and serve large models on any hardware, with proof that the numbers are right.

lindos.launch()                                    one process, torchrun, Slurm or mpirun
with lindos.lazy(): model = ...                    no memory until the plan is known
booster = lindos.Booster(lindos.HybridParallel(tp=2))
model, optimizer, loader, scheduler = booster.boost(model, optimizer, loader, scheduler)
for batch in loader: booster.step(batch)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lindos.booster.booster import Booster
    from lindos.booster.lazy import from_pretrained, lazy
    from lindos.booster.loss import per_token
    from lindos.booster.plugins import DDP, Gemini, HybridParallel, LowLevelZero
    from lindos.comm.launch import launch
    from lindos.core import errors
    from lindos.proof.prove import prove

__version__ = "0.1.0"

# Each public name and where it lives. torch is imported with the first of them, so that `lindos --help` is quick.
_HOMES = {
    "DDP": "lindos.booster.plugins",
    "Booster": "lindos.booster.booster",
    "Gemini": "lindos.booster.plugins",
    "HybridParallel": "lindos.booster.plugins",
    "LowLevelZero": "lindos.booster.plugins",
    "errors": "lindos.core.errors",
    "from_pretrained": "lindos.booster.lazy",
    "launch": "lindos.comm.launch",
    "lazy": "lindos.booster.lazy",
    "per_token": "lindos.booster.loss",
    "prove": "lindos.proof.prove",
}
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lindos' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = globals()[name] = home if name == "errors" else getattr(home, name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
