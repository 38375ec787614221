"""Layers per stage, as --balance asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from training.launch.errors import UserError
from training.layouts.measure import cut_in_words, sizes_as_asked, split_by, stage_sizes


def test_sizes_of_stages() -> None:
    """Five blocks are 12 layers, with the embedding and the head."""
    blocks = [3, 2, 2, 2, 3]
    assert sizes_as_asked("uniform", blocks, 2) == [7, 5]
    assert sizes_as_asked("1,3,1", blocks, 3) == [3, 6, 3]
    assert split_by("uniform", 8, 3, "layers") == [3, 3, 2]
    for wrong in ("3,3", "5", "5,0", "2,x", ""):
        with pytest.raises(UserError, match="2 positive numbers that add up to the 5 blocks"):
            split_by(wrong, 5, 2, "blocks")


def test_ranks_wait_as_long_as_the_layers_are_measured() -> None:
    """And not until their time-out."""
    world: Any = SimpleNamespace(on_main=Mock(return_value=[3, 4]), is_main=False)
    setup: Any = SimpleNamespace(args=SimpleNamespace(balance="auto"), cut=None)
    assert stage_sizes(Mock(), world, setup, 2, 1) == [3, 4]


def test_what_the_layers_are_where_a_block_has_several() -> None:
    """GPT-2 says how many blocks it has, VGG nothing."""
    gpt2: Any = SimpleNamespace(blocks=[3, 3])
    vgg: Any = SimpleNamespace(blocks=[1] * 16)
    assert (
        cut_in_words(gpt2, [4, 2]) == "layers per stage: 4 | 2 (embedding, halves of blocks, head)"
    )
    assert cut_in_words(vgg, [9, 7]) == "layers per stage: 9 | 7"
