"""The programs: what a person runs."""
