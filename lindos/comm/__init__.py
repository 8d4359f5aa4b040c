"""The only floor that talks to other ranks: the world, its collectives by axis name, the record of them, verdicts."""
