"""Does to real runs what happens to them: see `python -m tests.chaos --help`."""
