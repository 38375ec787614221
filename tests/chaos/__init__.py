"""Does to real runs what happens to them: see strikes.py, which `make chaos` runs."""
