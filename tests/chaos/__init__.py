"""Kills, stops and interrupts real runs: see strikes.py, which `make chaos` runs."""
