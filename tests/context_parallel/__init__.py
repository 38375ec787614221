"""Tests of context_parallel/. That a model trains with it as on one process: tests/equivalence."""
