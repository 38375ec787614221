"""What --balance says about blocks, or layers, per stage."""

from __future__ import annotations

import pytest

from training.model import sizes_of_blocks, split_by


def test_balance_from_text() -> None:
    assert split_by("uniform", 8, 3, "layers") == [3, 3, 2]
    assert split_by("1,2,1", 4, 3, "layers") == [1, 2, 1]
    assert sizes_of_blocks("1,2", 3, 2) == [3, 5]  # halves, the embedding, the head
    assert sizes_of_blocks("auto", 3, 2) is None


@pytest.mark.parametrize("text", ["fast", "4,x", "3,3", "4,4,4", "8,0", ""])
def test_a_wrong_balance_says_what_would_work(text: str) -> None:
    with pytest.raises(ValueError, match=r"auto, uniform, or 2 positive numbers .* as 4,4"):
        split_by(text, 8, 2, "layers")
