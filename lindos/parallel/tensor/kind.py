"""The tensor axis: roles into the ledger, then forwards into the model."""

from __future__ import annotations

from torch import nn

from lindos.comm.world import World
from lindos.core.ledger import Ledger
from lindos.core.mesh import Mesh
from lindos.core.rules import Rule, Rules
from lindos.parallel.tensor import attention
from lindos.parallel.tensor.forwards import Crossing, install
from lindos.parallel.tensor.roles import AXIS, Heads, attention_heads, write
from lindos.parallel.tensor.tables import table_of


class Tensor:
    """Tensor parallelism of one model by rules.

    Attributes:
        crossing: the state that the forwards share, once applied.
    """

    def __init__(self, rules: Rules, algorithm: str = "1d") -> None:
        self.rules, self.table = rules, table_of(algorithm)
        self.resolved: dict[str, Rule] = {}
        self.heads: dict[str, Heads] = {}
        self.crossing: Crossing | None = None
        self.model: nn.Module | None = None

    def read(self, model: nn.Module, parts: int) -> Tensor:
        """Match the rules against the model's modules.

        Raises:
            RulesError: a rule matches nothing, or two match one module.
            LayoutError: heads that tp cannot cut.
        """
        names = [name for name, _ in model.named_modules() if name]
        self.model, self.resolved = model, self.rules.resolve(names)
        modules = dict(model.named_modules())
        for name, rule in self.resolved.items():
            if rule.heads:
                self.heads[name] = attention_heads(name, rule, self.resolved, modules, parts)
        return self

    def contribute(self, ledger: Ledger, mesh: Mesh) -> Mesh:
        assert self.model is not None
        return write(ledger, mesh, self.resolved, self.model, self.table) if mesh.size(AXIS) > 1 else mesh

    def apply(self, model: nn.Module, ledger: Ledger, world: World) -> None:
        self.crossing = Crossing(world)
        if world.mesh.size(AXIS) > 1:
            install(model, self.resolved, self.crossing, self.heads)
            attention.localise(model, self.heads, world.mesh.coordinate(AXIS))
