"""Every chapter imports this file first: if torch is missing, `project` says what to type."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import project  # noqa: F401

sys.path.pop()
