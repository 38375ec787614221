"""Predicts the cost of a parallel run; trains nothing."""
