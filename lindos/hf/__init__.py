"""Everything that knows transformers, and the only package that imports it (inside functions: it takes seconds)."""
