"""Benchmarks against other implementations: `python -m benchmarks` runs all and prints tables."""

import project  # noqa: F401  (first: it says what to type if the environment is not active)
