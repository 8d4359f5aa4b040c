"""Proof: any plan against one process. `lindos.prove(type="llama", tp=2).verdict == "equal"`."""

from lindos.proof.prove import prove
from lindos.proof.report import Report

__all__ = ["Report", "prove"]
