"""Data parallelism: every process holds a whole model, or its shard of one."""
