"""Context parallelism: a sequence's positions lie on several ranks; only attention exchanges."""
