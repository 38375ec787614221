"""The table of a run's axes. Imports nothing.

Every rank of a run has a place in a mesh, dp x shards x ep x cp x pp x tp (mesh.py). Whatever is
done for each axis goes through `AXES`: the mesh and its groups, the values of --dp, --shards, --ep,
--cp, --pp, --tp, the names of workdirs, the words of a run's first line. (What an axis means for a
layout stands in that layout; the planner, which imports no runtime, prices axes by a table of its
own.)

    axis   its ranks have                      and exchange data
    dp     different examples                  after backward: gradients are added up
    shards different examples and shards       in every layer (ZeRO 3), or after backward
    ep     different examples and experts      in every layer of experts, and after backward
    cp     different positions of one example  in every attention, and after backward
    pp     different layers                    once per micro-batch
    tp     different parts of every matrix     several times in every layer

A user's --dp counts all ranks with different examples, including those along shards and ep, and
--shards includes those along ep: --dp 8 --shards 4 --ep 2 is a mesh of dp 2, shards 2, ep 2. So
ranks along dp hold the same parameters, and all ranks that share one copy of the model are
neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AXES = {  # outermost first, each in a word
    "dp": "data",
    "shards": "shards",
    "ep": "expert",
    "cp": "context",
    "pp": "pipeline",
    "tp": "tensor",
}
BATCH_AXES = ("dp", "shards", "ep")  # a batch is divided among their ranks
DATA_AXES = ("dp", "shards", "ep", "cp")  # whose losses and gradients add up
EXPERT_AXES = ("dp", "shards", "cp")  # whose ranks have the same experts
SHARD_AXES = ("shards", "ep", "cp")  # whose ranks may share one copy of the model
EXPERT_SHARD_AXES = ("shards", "cp")  # whose ranks may share one copy of their experts
LAYER_AXES = ("dp", "shards", "ep", "cp", "tp")  # whose ranks have the same layers, or parts
FACTORS = ("dp", "cp", "pp", "tp")  # whose options multiply to the number of ranks
SELDOM = ("shards", "ep", "cp")  # which are not named where they have one rank


def sizes(**ranks: int) -> dict[str, Any]:
    """The number of ranks on every axis: those given, and 1 on the others."""
    if unknown := ranks.keys() - AXES.keys():
        raise ValueError(f"{', '.join(unknown)}: the axes are {', '.join(AXES)}")
    return {axis: ranks.get(axis, 1) for axis in AXES}


def ranks_of(options: Mapping[str, Any]) -> dict[str, int]:
    """The number of ranks on every axis, from the options of a run. None is 1, except for shards
    under ZeRO, where it is all ranks of --dp."""
    ranks = {axis: options.get(axis) or 1 for axis in AXES}
    of_a_copy = options.get("shards") or (ranks["dp"] if options.get("zero") else 1)
    together = max(of_a_copy, ranks["ep"])  # ranks with different examples that share a copy
    return {**ranks, "dp": ranks["dp"] // together, "shards": together // ranks["ep"]}


def named(lengths: Mapping[str, int]) -> str:
    """A mesh for the name of a folder: 2x2x1, or 2x2x1-cp2."""
    usual = "x".join(str(lengths[axis]) for axis in AXES if axis not in SELDOM)
    return usual + "".join(f"-{axis}{lengths[axis]}" for axis in SELDOM if lengths[axis] > 1)


def axes_in_words(lengths: Mapping[str, int]) -> str:
    """The ranks on every axis for a person: data 2 x pipeline 2 x tensor 1."""
    said = [axis for axis in AXES if axis not in SELDOM or lengths[axis] > 1]
    return " x ".join(f"{AXES[axis]} {lengths[axis]}" for axis in said)


def place_of(rank: int, ranks: Mapping[str, int]) -> dict[str, int]:
    """A rank's place on every axis, by the number of ranks on each."""
    place = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, ranks[axis])
    return place
