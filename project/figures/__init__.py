"""What a run left, and how it is drawn."""

import os

# Figures are written to files. The environment may name a backend that this Python lacks: a
# notebook passes its own on to the programs that it starts.
os.environ["MPLBACKEND"] = "agg"
