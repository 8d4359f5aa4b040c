"""The public face: plugins say what a plan is, compose builds it, Booster runs it."""
