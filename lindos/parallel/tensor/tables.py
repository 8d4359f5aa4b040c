"""A table per algorithm: two activation layouts, and what a column and a row role gather and scatter.

R is the residual stream (norms, embedding output); P lies between a column and a row role (heads, MLP inner,
vocabulary of the logits). Everything else follows: backward is the adjoint (gather and scatter swap, a sum stays one).

    1d        R [B, S, H]      P [B, S, N/tp]
      column  weight [N/tp, K]   in: whole, its gradient summed over tp     out: P
      row     weight [N, K/tp]   in: P      out: summed over tp into R
"""

from __future__ import annotations

from dataclasses import dataclass

from lindos.core.errors import RefusedError


@dataclass(frozen=True)
class Table:
    """One algorithm.

    Attributes:
        name: its name in the plan.
        features_of_residual: axes that cut the features of R; none means whole.
        features_of_inner: axes that cut the features of P.
        batch_of_residual: axes that cut the rows of R.
        batch_of_inner: axes that cut the rows of P.
        gathered: axes over which a weight is gathered for use.
    """

    name: str
    features_of_residual: tuple[str, ...]
    features_of_inner: tuple[str, ...]
    batch_of_residual: tuple[str, ...] = ()
    batch_of_inner: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()

    def partial_on_inner(self) -> tuple[str, ...]:
        """Axes over which the gradient of a whole parameter on P is partial: all that cut P."""
        return (*self.batch_of_inner, *self.features_of_inner)

    def partial_on_residual(self) -> tuple[str, ...]:
        """Axes over which the gradient of a whole parameter on R is partial."""
        return (*self.batch_of_residual, *self.features_of_residual)


TABLES = {"1d": Table("1d", features_of_residual=(), features_of_inner=("tp",))}


def table_of(name: str) -> Table:
    """The table of an algorithm.

    Raises:
        RefusedError: it is not served yet.
    """
    if name not in TABLES:
        raise RefusedError(f"tensor={name!r} is not served yet. Use tensor='1d'.")
    return TABLES[name]
