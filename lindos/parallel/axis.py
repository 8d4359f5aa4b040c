"""AxisKind: what every kind of parallel axis offers to the sentence that composes them."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from lindos.comm.world import World
from lindos.core.ledger import Ledger
from lindos.core.mesh import Mesh


class AxisKind(Protocol):
    """One kind of axis: a pure column in the ledger, then a change of the model in place."""

    def contribute(self, ledger: Ledger, mesh: Mesh) -> Mesh:
        """Write this axis's columns; return the mesh with the sub-axes that they name. Touches no tensor."""
        ...

    def apply(self, model: nn.Module, ledger: Ledger, world: World) -> None:
        """Make the model's modules compute on local tensors."""
        ...
