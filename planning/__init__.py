"""Predicts what a parallel run costs, and never trains."""
