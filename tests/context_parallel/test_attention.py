"""Attention over several ranks beside attention on one: results, gradients, and what is sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from context_parallel import blocks, ring
from context_parallel.heads import heads_attention
from context_parallel.positions import zigzag
from context_parallel.ring import ring_attention
from runtime.communicator import Communicator
from runtime.documents import SHORT
from runtime.dropout import attention
from tests.mathematics.formulas import heads_traffic, ring_traffic
from tests.ranks import Ranks, nan_in_new_memory
from tests.remote import on_ranks

B, H, T, E = 2, 12, 24, 8  # T: of all ranks
KEYS = torch.tensor([3**30, -(5**20)])
WAYS: dict[str, Any] = {"ring": ring_attention, "heads": heads_attention}


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, and a gradient of the result. Scores are large, so that a wrong maximum shows."""
    torch.manual_seed(1)
    q, k, v, d = torch.randn(4, B, H, T, E, dtype=torch.float64).to(dtype)
    return [6 * q, k, v, d]


def starts() -> Tensor:
    """Of documents that end within, at, and across the stretches of several ranks."""
    return torch.tensor([[0] * 3 + [3] * 13 + [16] * 8, [0] * 6 + [6, 7] + [8] * 16])


def results(
    attend: Callable[..., Tensor], tensors: list[Tensor], p: float, apart: bool = False
) -> list[Tensor]:
    """What it returns, and the gradients of q, k and v."""
    *qkv, d = (t.clone() for t in tensors)
    for t in qkv:
        t.requires_grad_()
    # The site, the number of the first head, and where documents start.
    out = attend(*qkv, None, p, KEYS, 7, 5, starts() if apart else None)
    out.backward(d)
    return [out.detach(), *(t.grad for t in qkv if t.grad is not None)]


def differences(
    rank: int, world_size: int, way: str, p: float, dtype: torch.dtype, apart: bool = False
) -> tuple[list[float], list[tuple[str, int]]]:
    """How far this rank's positions are from those of one process; and the messages of a step."""
    ranks = Communicator(dist.group.WORLD)
    seen, start = list[tuple[str, int]](), ranks._start

    def noted(kind: str, x: Tensor, send: Any, read: Any, lengths: Any = ()) -> Any:
        to_others = sum(n for to, n in enumerate(lengths[rank]) if to != rank)
        seen.append((kind, to_others * x[0].numel()))
        return start(kind, x, send, read, lengths)

    ranks._start = noted  # type: ignore[method-assign]
    whole = results(attention, inputs(torch.float64), p, apart)
    own = zigzag(rank, world_size, T)
    with nan_in_new_memory(), patch.object(ring, "QUERIES", 2 if apart else 256):
        found = results(partial(WAYS[way], ranks), [t[:, :, own] for t in inputs(dtype)], p, apart)
    off = [float((f - w[:, :, own]).abs().max()) for f, w in zip(found, whole, strict=True)]
    return off, seen


def rounding(dtype: torch.dtype, p: float, apart: bool = False) -> list[float]:
    """How far one process is from float64."""
    pairs = zip(
        results(attention, inputs(dtype), p, apart),
        results(attention, inputs(torch.float64), p, apart),
        strict=True,
    )
    return [float((a - b).abs().max()) for a, b in pairs]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("c", [2, 3, 4])
def test_several_ranks_compute_what_one_does(
    world_of: Callable[[int], Ranks], c: int, way: str, p: float
) -> None:
    """And send what docstrings and formulas say."""
    formulas = {"ring": ring_traffic, "heads": heads_traffic}
    for off, seen in world_of(c).run(differences, way, p, torch.float64):
        assert len(off) == 4 and max(off) < 1e-12
        own = B * H * (T // c) * E  # numbers in a rank's keys
        if way == "ring":
            kv = 2 * own
            # Backward: with keys and values the gradients of those of the step before, but not of
            # a rank's own; in the end the last ones go home.
            backward = {2: [kv], 3: [kv, kv, kv], 4: [kv, kv, 2 * kv, kv]}[c] + [kv]
            sent = [kv] * (c - 1) + backward
        else:
            there, back = 3 * own * (c - 1) // c, own * (c - 1) // c
            sent = [there, back, back, there]
        assert sum(sent) == formulas[way](B, T, H * E, c, element=1)
        assert seen == [("all_to_all", n) for n in sent]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("c", [2, 3, 4])
def test_documents_do_not_see_each_other(
    world_of: Callable[[int], Ranks], c: int, p: float
) -> None:
    """Under a ring and, since heads have all positions, there as on one rank."""
    for way in WAYS:
        for off, _ in world_of(c).run(differences, way, p, torch.float64, True):
            assert len(off) == 4 and max(off) < 1e-12
    usual = rounding(torch.bfloat16, p, apart=True)
    for off, _ in world_of(c).run(differences, "ring", p, torch.bfloat16, True):
        assert all(a < 1.5 * b for a, b in zip(off, usual, strict=True))


def test_what_is_seen_whole_has_no_mask_and_what_is_not_seen_no_block() -> None:
    """Two ranks, 16 positions; a document of nine, then one of seven."""
    positions = [zigzag(r, 2, 16) for r in range(2)]  # 0-3 and 12-15; 4-11
    own = torch.tensor([[0] * 9 + [9] * 7])[:, positions[1]]
    with patch.object(ring, "QUERIES", 2):
        found = [
            [(positions[1][rows].tolist(), positions[owner][columns].tolist(), mask is not None)
             for rows, columns, _, mask in ring._blocks_of_documents(
                 positions, 1, own, torch.float64, owner)]
            for owner in range(2)
        ]  # fmt: skip
    early = [0, 1, 2, 3]
    assert found[0] == [([4, 5], early, False), ([6, 7], early, False), ([8, 9], early, True)]
    assert found[1] == [
        ([4, 5], [4, 5], True), ([6, 7], [4, 5, 6, 7], True),
        ([8, 9], [4, 5, 6, 7, 8, 9], True), ([10, 11], [9, 10, 11], True),
    ]  # fmt: skip


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("c", [2, 4])
def test_in_half_precision(world_of: Callable[[int], Ranks], c: int, way: str, p: float) -> None:
    """No worse than one process, which rounds as often: sums over ranks are in float32."""
    usual = rounding(torch.bfloat16, p)
    for off, _ in world_of(c).run(differences, way, p, torch.bfloat16):
        assert all(a < 1.5 * b for a, b in zip(off, usual, strict=True))


@on_ranks(2)
def test_blocks_are_joined_in_float32(rank: int, size: int) -> None:
    q, k, v, _ = (t[:, :, zigzag(rank, size, T)] for t in inputs(torch.bfloat16))
    with patch.object(ring, "_join", wraps=ring._join) as join:
        ring_attention(Communicator(dist.group.WORLD), q, k, v, None, 0.0, KEYS, 7)
    assert {t.dtype for call in join.mock_calls for t in call.args[:2]} == {torch.float32}


@on_ranks(3)
def test_gradients_of_queries_are_summed_in_float32(_rank: int, _size: int) -> None:
    """256 + 1 + 1 are 258, and 256 if each sum is rounded to 16 bits. The last queries of a rank
    see keys of all."""
    q = torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    turns = iter((256.0, 1.0, 1.0))

    def constant(_d: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
        value = next(turns)
        return [torch.full_like(x, value) for x in (q, k, v)]

    with patch.object(blocks, "backward", constant):
        world, other = Communicator(dist.group.WORLD), q.detach()
        out = ring_attention(world, q, other, other, None, 0.0, KEYS, 7)
        out.backward(out.detach())
    assert q.grad is not None and q.grad[:, :, 2:].eq(258).all()


@pytest.mark.parametrize(
    ("dtype", "of_products", "rounding"),
    [(torch.float64, torch.float64, 1e-13), (torch.bfloat16, torch.float32, 2**-6)],
)
def test_every_way_to_compute_a_block_is_the_same(
    dtype: torch.dtype, of_products: torch.dtype, rounding: float
) -> None:
    """The kernel, and products that drop nothing; with a mask, and with other keys than queries.
    That of 16 bits on a GPU, where the tests see one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q, k, v, d = (t.to(device) for t in inputs(dtype))
    for queries, keys, causal in ((T, T, True), (T // 2, T, False), (T, T // 2, False)):
        found = []
        for each, dropped in ((dtype, None), (of_products, lambda weights: weights)):
            some = q[:, :, :queries].to(each), k[:, :, :keys].to(each), v[:, :, :keys].to(each)
            out, log_sum, drawn = blocks.forward(*some, causal, dropped)
            # As if there were more keys: the block is a part of them.
            joined = d[:, :, :queries].to(each), *some, out * 0.7, log_sum + 0.1
            gradients = blocks.backward(*joined, causal, dropped, 0.0, drawn)
            found.append([out, log_sum, *gradients])
        for kernel, products in zip(*found, strict=True):
            assert kernel.shape == products.shape
            assert (kernel - products).abs().max() < rounding * products.abs().max()


def drawn(rank: int, _: int, keys: int | None) -> tuple[bool, bool, float]:
    """Whether two calls drop the same, after the same seed and without; and the share they drop."""
    attend = partial(ring_attention, Communicator(dist.group.WORLD))
    like, v = torch.zeros(1, 1, 64, 4), torch.ones(1, 1, 64, 4)

    def kept() -> Tensor:
        return attend(like, like, v, None, 0.5, keys, 7)

    torch.manual_seed(rank)
    one, two = kept(), kept()
    torch.manual_seed(rank)
    return bool(one.equal(kept())), bool(one.equal(two)), float(one.mean())


def test_masks_without_a_key_for_each_example_are_drawn_once(ranks: Ranks) -> None:
    """From one number for all, as on a GPU; or from torch's generator. Weights are as likely kept
    as not, and then doubled: their sum is 1 on average."""
    for keys in (5**20, None):
        for again, at_once, mean in ranks.run(drawn, keys):
            assert again and at_once == (keys is not None) and abs(mean - 1) < 0.1


def shape_of(*sizes: int) -> Tensor:
    return torch.zeros(*sizes, dtype=torch.float64)


@pytest.mark.parametrize("kind", WAYS)
def test_what_is_not_computed_is_refused(kind: str) -> None:
    way, x = partial(WAYS[kind], Communicator()), shape_of(1, 2, 4, 8)
    for given, words in (
        ((x, x, x, shape_of(4, 4)), "is causal, and takes no mask: give None"),
        ((x, x, shape_of(1, 2, 6, 8), None), "8] of float64, .* must have one shape and type"),
        ((x, x.float(), x, None), r"\[1, 2, 4, 8\] of float32, .* must have one shape and type"),
        ((x[0], x[0], x[0], None), r"q has 3 dimensions: it takes 4, \[B, H, T, E\]"),
        # Torch's kernel for CPUs divides by their number: the process dies.
        ((x[:, :, :0],) * 3 + (None,), "0 positions on a rank: .* 2 work"),
    ):
        with pytest.raises(ValueError, match=words):
            way(*given, 0.0, None, 7)
    for p in (-0.1, 1.0, 1.5):  # masks would drop nothing, all, or more
        with pytest.raises(ValueError, match=f"p is {p}: .* 0 or more and less than 1 works"):
            way(x, x, x, None, p, None, 7)
    with pytest.raises(ValueError, match=r"starts has 6 positions, and the whole sequence 4: give"):
        way(x, x, x, None, 0.0, None, 7, starts=shape_of(1, 6).long())


@on_ranks(2)
def test_numbers_that_cannot_be_cut_are_refused_with_one_that_can(_rank: int, _size: int) -> None:
    ranks = Communicator(dist.group.WORLD)
    x = shape_of(1, 3, 5, 8)
    with pytest.raises(ValueError, match=r"5 positions on a rank.* 6 work"):
        ring_attention(ranks, x, x, x, None, 0.0, None, 7)
    with pytest.raises(ValueError, match=r"5 positions on a rank.* 6 work"):
        heads_attention(ranks, x[:, :2], x[:, :2], x[:, :2], None, 0.0, None, 7)
    with pytest.raises(ValueError, match="3 heads cannot be cut over 2 ranks; 4 can"):
        heads_attention(ranks, x[:, :, :4], x[:, :, :4], x[:, :, :4], None, 0.0, None, 7)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("way", WAYS)
def test_one_rank_is_a_group_too_whatever_the_strides(way: str, p: float) -> None:
    """Kernels take it for granted that the channels of a head lie side by side."""
    q, k, v, d = inputs(torch.float64)
    apart = [t.mT.contiguous().mT for t in (q, k, v)]
    found = results(partial(WAYS[way], Communicator()), [*apart, d], p)
    for one, other in zip(found, results(attention, [q, k, v, d], p), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@on_ranks(2)
def test_ranks_without_examples_take_part(_rank: int, _size: int) -> None:
    """Also within documents, in rows that a CPU cuts into stretches, and in short ones."""
    ranks = Communicator(dist.group.WORLD)
    ways: list[Callable[..., Tensor]] = [partial(way, ranks) for way in WAYS.values()]
    for attend in (attention, *ways):
        for length in (8, SHORT + 2):
            x = shape_of(0, 2, length, 8).requires_grad_()
            for starts in (None, torch.zeros(0, length, dtype=torch.long)):
                attend(x, x, x, None, 0.0, None, 7, starts=starts).sum().backward()
            assert x.grad is not None and x.grad.shape == (0, 2, length, 8)


@pytest.mark.parametrize("p", [0.0, 0.3])
@on_ranks(2)
def test_second_derivatives_are_refused(_rank: int, _size: int, p: float) -> None:
    """With hashed masks, which are products, autograd would differentiate some of what it sees."""
    q = torch.randn(2, 2, 4, 8, requires_grad=True)
    out = ring_attention(Communicator(dist.group.WORLD), q, q, q, None, p, KEYS, 7)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
