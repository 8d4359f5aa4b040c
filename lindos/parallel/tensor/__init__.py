"""Tensor parallelism: one implementation, a table per algorithm."""
