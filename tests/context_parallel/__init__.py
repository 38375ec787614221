"""Tests of context_parallel/. tests/equivalence checks that models train as on one process."""
