"""What a run left, and how it is drawn."""

import os

# Figures are files. The environment may name a backend that this Python lacks: a notebook hands its
# own on to what it starts.
os.environ["MPLBACKEND"] = "agg"
