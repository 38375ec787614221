"""Which positions a rank has, and what of a micro-batch comes with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from context_parallel.positions import multiple, zigzag
from training.layouts.context import NO_LABEL, own_positions
from training.tasks.gpt2 import Sequences


class Place:
    """A rank of several, that sends nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_the_stretches_of_two_and_three_ranks() -> None:
    assert [zigzag(r, 2, 8).tolist() for r in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [zigzag(r, 3, 6).tolist() for r in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_no_position_is_lost() -> None:
    with pytest.raises(ValueError, match=r"10 positions cannot be cut over 2 ranks.* 12 can"):
        zigzag(0, 2, 10)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {rank} of 2: its number .* one of 0 to 1"):
            zigzag(rank, 2, 8)


@pytest.mark.parametrize("c", [2, 3, 4, 8])
def test_each_position_is_somewhere_and_all_ranks_have_equal_work(c: int) -> None:
    positions = [zigzag(r, c, 6 * c) for r in range(c)]
    assert sorted(torch.cat(positions).tolist()) == list(range(6 * c))
    assert {int((own + 1).sum()) for own in positions} == {6 * c * (6 * c + 1) // 2 // c}


def test_lengths_that_can_be_cut() -> None:
    """Two stretches of each of c ranks; t of a rank's positions, or their multiples."""
    found = {(c, t): multiple(c, t) for c in (2, 3) for t in (1, 2, 3, 4)}
    assert found == {
        (2, 1): 4, (2, 2): 4, (2, 3): 12, (2, 4): 8, (3, 1): 6, (3, 2): 6, (3, 3): 18, (3, 4): 12,
    }  # fmt: skip


def cut(x: Sequences, labels: torch.Tensor, c: int) -> list[tuple[Any, ...]]:
    """Ids, positions, and the targets with their labels, on every rank."""
    found = []
    for r in range(c):
        place: Any = Place(r, c)
        part, own = own_positions(x, labels, place)
        assert part.targets is not None and part.positions is not None
        pairs = list(zip(part.targets.tolist(), own.tolist(), strict=True))
        found.append((part.hidden.tolist(), part.positions.tolist(), pairs))
    return found


def test_the_label_at_a_cut_is_the_next_ranks_first_token() -> None:
    """Two sentences of six tokens and five, seven inputs with padding, of which each has targets
    from its third token on. Two ranks have positions 0 1 6 7 and 2 3 4 5."""
    ids = torch.tensor([[10, 11, 12, 13, 14, 15, 0], [20, 21, 22, 23, 24, 0, 0]])
    targets = torch.tensor([2, 3, 4, 5, 9, 10, 11])  # 7 + 2, ...
    labels = torch.tensor([13, 14, 15, 16, 23, 24, 25])
    wanted = [
        ([[10, 11, 0, 0], [20, 21, 0, 0]], [0, 1, 6, 7], []),
        ([[12, 13, 14, 15], [22, 23, 24, 0]], [2, 3, 4, 5],
         [(0, 13), (1, 14), (2, 15), (3, 16), (4, 23), (5, 24), (6, 25)]),
    ]  # fmt: skip
    assert cut(Sequences(ids, targets), labels, 2) == wanted
    weights = torch.zeros(14).index_fill(0, targets, 1).view(2, 7)  # as in validation
    assert cut(Sequences(ids, weights), labels, 2) == wanted


def test_where_every_position_has_a_target() -> None:
    """As in plain text. The label of position 1 is the token of position 2, which is elsewhere."""
    ids, targets = torch.arange(4)[None], torch.arange(4)
    assert cut(Sequences(ids, targets), ids[0] + 1, 2) == [
        ([[0, 3]], [0, 3], [(0, 1), (1, 4)]), ([[1, 2]], [1, 2], [(0, 2), (1, 3)]),
    ]  # fmt: skip


def test_what_no_rank_has_a_position_for() -> None:
    """One token for four stretches; nothing at all."""
    x = Sequences(torch.tensor([[5]]), torch.tensor([0]))
    assert cut(x, torch.tensor([6]), 2) == [([[5, 0]], [0, 3], [(0, 6)]), ([[0, 0]], [1, 2], [])]
    x = Sequences(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    assert cut(x, torch.zeros(0, dtype=torch.long), 2)[1] == ([], [1, 2], [])
    assert NO_LABEL < 0  # no token


def test_ranks_draw_other_masks_on_a_gpu() -> None:
    """There one number selects the masks of a micro-batch."""
    x = Sequences(torch.zeros(1, 4, dtype=torch.long), torch.arange(4), keys=5)
    places: list[Any] = [Place(r, 2) for r in range(2)]
    keys = [own_positions(x, torch.arange(4), place)[0].keys for place in places]
    assert len({5, *keys}) == 3
