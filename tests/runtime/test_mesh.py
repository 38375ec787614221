"""A mesh of named axes: every rank's place, and whom it meets."""

from __future__ import annotations

from dataclasses import fields

import pytest

from runtime.axes import AXES, DATA_AXES, place_of, sizes
from runtime.mesh import GROUPS, make_mesh
from training.options import Options


def test_the_last_axis_has_the_neighbours() -> None:
    """3 x 2 x 4 ranks, in the order of the picture in runtime/mesh.py: uneven, so that no two axes
    can be exchanged."""
    ranks = sizes(dp=3, tp=4, pp=2)
    assert list(ranks) == list(AXES) == ["dp", "pp", "tp"]
    places = [tuple(place_of(rank, ranks).values()) for rank in range(24)]
    assert places == [(t, p, d) for d in range(3) for p in range(2) for t in range(4)]
    assert place_of(13, ranks) == {"dp": 1, "pp": 1, "tp": 1}


def test_one_process_has_every_axis() -> None:
    mesh = make_mesh({}, 1.0)
    assert [mesh[axis] for axis in AXES] == [(0, 1, None)] * 3 and mesh.counts_loss


def test_every_axis_has_an_option_and_groups() -> None:
    assert {*AXES} <= {field.name for field in fields(Options)}
    assert {axis for axes in GROUPS for axis in axes} == {*AXES} and {*DATA_AXES} < {*AXES}


def test_what_is_no_mesh() -> None:
    with pytest.raises(ValueError, match=r"^1 x 2 x 1 is not the number of ranks, 1$"):
        make_mesh({"pp": 2}, 1.0)
    with pytest.raises(ValueError, match=r"^xp: the axes are dp, pp, tp$"):
        make_mesh({"xp": 2}, 1.0)
