"""One package per kind of axis. Siblings never import each other: they meet in the ledger."""
