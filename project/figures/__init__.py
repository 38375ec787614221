"""What a run left, and how it is drawn."""
