import project  # noqa: F401  (first: it says what to type if the environment is not active)
