"""Side by side with peers: `python -m benchmarks` runs every comparison and prints one table."""
