"""Checkpoints that any plan loads: files of owned boxes, one manifest, published by one rename."""
