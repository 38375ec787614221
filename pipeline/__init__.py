"""Pipeline parallelism: the layers are cut into stages, and micro-batches flow through them."""
