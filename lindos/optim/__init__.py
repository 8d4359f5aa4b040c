"""One optimizer class around the user's own, and one norm function."""
