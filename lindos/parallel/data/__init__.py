"""Data parallelism: the chunk program over dp. One program for every ZeRO stage."""
