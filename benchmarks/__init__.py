"""Measurements beside peers, in the same run, taken in turns. `python -m benchmarks --help`."""
