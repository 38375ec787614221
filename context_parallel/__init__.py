"""Context parallelism: the positions of a sequence lie on several ranks; only attention exchanges."""
