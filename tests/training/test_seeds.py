"""Streams of different seeds, purposes and numbers have nothing in common."""

from __future__ import annotations

from itertools import product

import torch

from training.model import generator_for
from training.seeds import stream


def test_a_stream_is_the_same_on_every_machine() -> None:
    assert stream(0, "data order", 1) == 6020721808494672217
    assert stream(3, "initial weights", "transformer.wte.weight") == 3167915402155702858


def test_no_two_streams_are_the_same() -> None:
    """As those of seed + epoch would be: epoch 1 of seed 0, and epoch 0 of seed 1."""
    purposes = ("data order", "dropout", "initial weights")
    of = [stream(*of) for of in product(range(12), purposes, range(12), range(12))]
    of += [stream(seed, purpose) for seed in range(200) for purpose in purposes]
    of += [stream(1, "dropout", 12), stream(11, "dropout", 2), stream(1, "dropout", "12")]
    assert len({value & 0xFFFFFFFF for value in of}) == len(of)  # of which torch takes no more
    assert min(of) >= 0 and max(of) < 2**63


def test_initial_weights_depend_on_seed_and_name() -> None:
    drawn = [
        torch.rand(3, generator=generator_for(seed, name)) for seed, name in product((0, 1), "ab")
    ]
    assert len({tuple(values.tolist()) for values in drawn}) == 4
    assert torch.equal(drawn[0], torch.rand(3, generator=generator_for(0, "a")))
