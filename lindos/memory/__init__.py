"""Where bytes rest. Chunks know no mesh: whoever reduces or gathers them brings the ranks."""
