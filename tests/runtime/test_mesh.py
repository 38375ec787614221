"""A mesh of named axes: every rank's place, and whom it meets."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist

from runtime.axes import (
    AXES,
    BATCH_AXES,
    DATA_AXES,
    EXPERT_AXES,
    SHARD_AXES,
    axes_in_words,
    named,
    place_of,
    ranks_of,
    sizes,
)
from runtime.mesh import GROUPS, make_mesh
from tests.ranks import Ranks
from training.options import Options


def test_the_last_axis_has_the_neighbours() -> None:
    """3 x 1 x 5 x 2 x 4 ranks, in the order of the picture in runtime/mesh.py: uneven, so that no
    two axes can be exchanged."""
    ranks = sizes(dp=3, tp=4, pp=2, cp=5)
    assert list(ranks) == list(AXES) == ["dp", "shards", "ep", "cp", "pp", "tp"]
    places = [place_of(rank, ranks) for rank in range(120)]
    every = product(range(3), range(1), range(1), range(5), range(2), range(4))
    assert places == [dict(zip(AXES, place, strict=True)) for place in every]
    assert place_of(53, ranks) == {"dp": 1, "shards": 0, "ep": 0, "cp": 1, "pp": 1, "tp": 1}


def test_one_process_has_every_axis() -> None:
    mesh = make_mesh({}, 1.0)
    assert [mesh[axis] for axis in AXES] == [(0, 1, None)] * 6


def test_every_axis_has_an_option_and_groups() -> None:
    assert {*AXES} <= {field.name for field in fields(Options)}
    assert {axis for axes in GROUPS for axis in axes} == {*AXES} and {*DATA_AXES} < {*AXES}


def test_replicas_that_share_experts_are_counted_by_dp() -> None:
    """--dp 4 --ep 2 --tp 2: a mesh of 2 x 1 x 2 x 1 x 1 x 2. Under ZeRO all share one copy, if
    --shards does not say how many."""
    options: dict[str, Any] = {"dp": 4, "ep": 2, "cp": None, "tp": 2}
    others = {"ep": 2, "cp": 1, "pp": 1, "tp": 2}
    assert ranks_of(options) == {"dp": 2, "shards": 1, **others}
    assert ranks_of({**options, "zero": 1}) == {"dp": 1, "shards": 2, **others}
    assert ranks_of({**options, "dp": 12, "zero": 3, "shards": 6}) == {
        "dp": 2,
        "shards": 3,
        **others,
    }
    assert ranks_of({"dp": 4, "zero": 3, "shards": 1}) == sizes(dp=4)
    lengths = {"dp": 4, "shards": 1, "ep": 2, "cp": 1, "pp": 1, "tp": 2}
    assert named(lengths) == "4x1x2-ep2" and named(lengths | {"ep": 1, "cp": 3}) == "4x1x2-cp3"
    assert axes_in_words(lengths) == "data 4 x expert 2 x pipeline 1 x tensor 2"


def members(rank: int, world_size: int, ranks: dict[str, int]) -> dict[tuple[str, ...], list[int]]:
    """Whom this rank meets. Two axes with the same ranks have one group, but not two inside of a
    layer, or one inside and one after backward."""
    mesh = make_mesh(ranks, 30.0)
    inside = [
        mesh[axis].group for axis in AXES if axis not in ("dp", "shards") and mesh[axis].size > 1
    ]
    after = mesh[DATA_AXES].group
    assert len({id(group) for group in [*inside, after]}) == len(inside) + 1
    found = {}
    for axes in GROUPS:
        place = mesh[axes]
        found[axes] = dist.get_process_group_ranks(place.group)
        assert (found[axes][place.rank], len(found[axes])) == (rank, place.size)
    assert world_size == 4
    return found


def test_whom_a_rank_meets(four_ranks: Ranks) -> None:
    found = four_ranks.run(members, {"dp": 1, "ep": 2, "cp": 2})[1]
    assert found[BATCH_AXES] == found["ep",] == [1, 3] and found[EXPERT_AXES] == [0, 1]
    assert found[DATA_AXES] == [0, 1, 2, 3] and found["cp",] == [0, 1] and found["tp",] == [1]
    found = four_ranks.run(members, {"cp": 2, "pp": 2})[3]
    assert found["pp",] == [2, 3] and found[DATA_AXES] == found["cp",] == [1, 3]
    found = four_ranks.run(members, {"dp": 2, "shards": 2})[1]
    assert found[SHARD_AXES] == [0, 1] and found["dp",] == [1, 3]  # neighbours share a copy


def test_what_is_no_mesh() -> None:
    with pytest.raises(ValueError, match=r"^data 1 x pipeline 2 x tensor 1 is not .* ranks, 1$"):
        make_mesh({"pp": 2}, 1.0)
    with pytest.raises(ValueError, match=r"^xp: the axes are dp, shards, ep, cp, pp, tp$"):
        make_mesh({"xp": 2}, 1.0)
