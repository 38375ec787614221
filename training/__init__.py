"""What every run shares, whatever the strategy: processes, data, model, checkpoints, records."""
