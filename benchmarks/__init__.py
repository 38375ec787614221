"""Benchmarks beside other implementations: `python -m benchmarks` runs all and prints tables."""
