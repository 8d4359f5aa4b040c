"""Pure values: where ranks stand, how tensors are cut, what each rank holds. Nothing here talks to another rank."""
