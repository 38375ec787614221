"""The table of a run's axes. Imports nothing.

A run has a place in a mesh for every rank, dp x pp x tp (mesh.py). Whatever is done for each axis
goes through `AXES`: the mesh and its groups, the values of --dp, --pp, --tp, the names of workdirs,
the words of a run's first line. (What an axis means for a layout stands in that layout; the
planner, which imports no runtime, prices axes by a table of its own.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AXES = {  # outermost first, each in a word
    "dp": "data",
    "pp": "pipeline",
    "tp": "tensor",
}
DATA_AXES = ("dp",)  # whose ranks train on other examples: their losses add up


def sizes(**ranks: int) -> dict[str, Any]:
    """The number of ranks on every axis: those given, and 1 on the others."""
    if unknown := ranks.keys() - AXES.keys():
        raise ValueError(f"{', '.join(unknown)}: the axes are {', '.join(AXES)}")
    return {axis: ranks.get(axis, 1) for axis in AXES}


def place_of(rank: int, ranks: Mapping[str, int]) -> dict[str, int]:
    """A rank's place on every axis, by the number of ranks on each."""
    place = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, ranks[axis])
    return place
