"""Does to real runs what happens to them on clusters: see `python -m tests.faults --help`."""
