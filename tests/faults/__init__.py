"""Strikes real runs with the faults of clusters: see `python -m tests.faults --help`."""
