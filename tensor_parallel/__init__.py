"""Tensor parallelism: the matrices of one layer are cut, and every rank multiplies by its part."""
