"""Tensor parallelism: a layer's matrices are cut, and every rank multiplies by its part."""
