"""Data parallelism: every process holds the whole model, or a shard of it."""
