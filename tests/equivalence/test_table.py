"""The table in short; every mutation turns rows of it red."""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Mapping, Sequence

import pytest
import torch

from tests.equivalence.compare import Result, check
from tests.equivalence.mutations import MUTATIONS
from tests.equivalence.plain import Reference, plain
from tests.equivalence.problems import Problem
from tests.equivalence.table import ODD, TABLE, find
from tests.ranks import Ranks
from training.world import World

STEPS = 2  # the second is the odd one where a row says so; a resumed run goes on with it
reference = functools.cache(functools.partial(plain, dtype=torch.float64))


def results(
    rank: int, world_size: int, names: list[str], references: bytes, mutation: str
) -> list[Result]:
    """Of some rows, with code that is broken, on a rank."""
    found, known = [], pickle.loads(references)
    for row in map(find, names):
        expected: Reference = known[row.problem.reference]
        steps = len(expected.losses)
        with MUTATIONS[mutation]():
            found.append(check(row, expected, World(rank, world_size), steps, torch.float64))
    return found


def failures(
    ranks: Ranks | None, names: list[str], mutation: str = "nothing", steps: int = STEPS
) -> list[str]:
    """What is said of each row; all ranks say the same."""
    problems = {find(name).problem.reference for name in names}
    known: Mapping[Problem, Reference] = {p: reference(p, steps) for p in problems}
    given = (names, pickle.dumps(known), mutation)  # bytes: torch would share each tensor as a file
    by_rank = [results(0, 1, *given)] if ranks is None else ranks.run(results, *given)
    said = [[result.failure for result in found] for found in by_rank]
    assert said == [said[0]] * len(said)
    return said[0]


def test_names_are_unique() -> None:
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names)) > 170


# The short form: every layout, way of averaging, ZeRO stage and schedule, on text and on pictures,
# and what is special in each. (A run that is resumed says what a second one would.) `make verify`
# runs all there are.
SHORT = (
    "single-one_more", "single-dropout", "threads1-1f1b-m3", "threads2-gpipe-m3",
    "threads2-1f1b-auto", "threads2-zb-clipped", "threads2-1f1b-untied", "threads2-sequential-m4",
    "threads2-1f1b-traced", "threads2-zb-recompute_sqrt", "threads2-interleaved-v2_m3",
    "threads2-zbv-clipped", "threads3-1f1b-m8", "threads3-zb-cut_6_1_1", "threads3-zb-resumed",
    "threads3-1f1b-dropout", "threads3-vhalf-v2_m8", "threads3-vmin-v2_m3", "module2-vgg16",
    "module3-gpt2", "blocks2-one_by_one", "blocks3-resumed", "ddp2-per_parameter-one_more",
    "ddp2-flat-no_target", "ddp2-overlap-m2", "ddp2-gloo-none_left", "ddp2-overlap-vgg16",
    "ddp2-overlap-resumed", "ddp2-overlap-dropout", "ddp2-overlap-recompute_always",
    "ddp3-overlap-none_left", "fsdp2-zero1-no_target", "fsdp2-zero2-one_more", "fsdp2-zero3-m2",
    "fsdp2-zero1-gloo", "fsdp2-zero3-gloo", "fsdp2-zero2-vgg16", "fsdp2-zero1-resumed",
    "fsdp2-zero3-dropout", "fsdp2-zero3-recompute_always", "fsdp3-zero3-none_left",
    "pipeline2-gpipe-m3", "pipeline2-1f1b-m8", "pipeline2-zb-untied", "pipeline2-zb-vgg16",
    "pipeline2-zb-resumed", "pipeline2-zb-dropout", "pipeline2-1f1b-recompute_except_last",
    "pipeline2-interleaved-resumed", "pipeline2-zbv-vgg16", "pipeline3-zb-gloo",
    "pipeline3-vhalf-v2_m3", "pipeline3-vmin-v2_m8", "mesh2-1x1x2", "mesh2-1x1x2-sequence",
    "mesh2-1x1x2-odd", "mesh2-1x1x2-gloo", "mesh2-2x1x1", "mesh2-2x1x1-zero1", "mesh3-1x1x3",
    "mesh4-1x2x2", "mesh4-2x1x2-sequence-zero3", "mesh4-1x2x2-sequence",
    "mesh4-2x2x1-zero1-resumed", "mesh4-1x2x2-resumed", "mesh4-1x2x2-recompute_always",
    "mesh4-2x2x1-zbv-zero1", "mesh4-1x2x2-interleaved",
)  # fmt: skip


def test_the_short_form_has_every_layout_and_schedule() -> None:
    """By the beginnings of the names: `fsdp2-zero3`."""

    def layouts(names: Sequence[str]) -> set[str]:
        found = {re.sub(r"\d(?=-)", "", "-".join(name.split("-")[:2])) for name in names}
        return {layout for layout in found if layout.startswith(("ddp", "fsdp", "pipe", "thr"))}

    assert layouts(SHORT) == layouts([row.name for row in TABLE])


@pytest.mark.parametrize("name", SHORT)
def test_a_layout_is_one_process(
    ranks: Ranks, three_ranks: Ranks, four_ranks: Ranks, name: str
) -> None:
    world = {1: None, 2: ranks, 3: three_ranks, 4: four_ranks}[find(name).ranks]
    assert failures(world, [name]) == [""]


def test_steps_without_target_or_finite_loss_are_left_out(ranks: Ranks) -> None:
    """Also the last one of an epoch, which has one example: fewer than ranks."""
    left_out = [gradients is None for gradients in reference(ODD, 7).gradients]
    assert left_out == [False, True, True, False, False, False, False]
    on_ranks = ["ddp2-overlap-odd", "fsdp2-zero3-odd", "pipeline2-1f1b-odd"]
    here = ["single-odd", "threads2-zb-odd", "blocks2-odd"]
    assert failures(ranks, on_ranks, steps=7) + failures(None, here, steps=7) == [""] * 6


def test_a_rank_may_have_no_target_but_never_all() -> None:
    row, targets = find("ddp2-flat-no_target"), []
    for rank in range(2):
        steps = row.problem.task(World(rank, 2), torch.float64).steps(0, rank, 2, 1)
        targets.append([sum(int(w.sum()) for _, w in step.targets) for step in steps])
    assert min(map(min, targets)) == 0
    assert min(map(sum, zip(*targets, strict=True))) > 0


# A mutation, and rows that it must turn red. (That they are green without is tested above, or by
# the whole table.)
RED = {
    "a_bucket_is_not_reduced": (
        "ddp2-per_parameter-even ddp2-flat-one_more ddp2-overlap-m2 ddp2-gloo-even"
    ),
    "a_rank_is_left_out_of_the_sum": "fsdp2-zero1-m2 fsdp2-zero2-m2 fsdp2-zero3-m2",
    "micro_batches_replace": (
        "fsdp2-zero1-m2 fsdp2-zero2-m2 fsdp2-zero3-m2 ddp2-flat-m2 ddp2-overlap-m2"
    ),
    "a_mean_over_ranks": "ddp2-overlap-even ddp2-flat-m2 ddp2-per_parameter-one_more",
    "a_micro_batch_is_not_scaled": (
        "ddp2-overlap-m2 pipeline2-zb-m8 fsdp2-zero1-m2 fsdp2-zero3-m2 threads2-gpipe-m3 "
        "threads3-zb-m3"
    ),
    "two_micro_batches_are_swapped": (
        "threads2-gpipe-same_length threads2-zb-same_length blocks3-split_size3 "
        "threads2-interleaved-same_length"
    ),
    "a_rank_loses_what_its_chunks_share": "pipeline2-zbv-clipped",
    "a_tied_weight_loses_a_gradient": "threads2-1f1b-m3 threads3-zb-m3",
    "a_rank_keeps_its_part_of_a_tied_gradient": "pipeline2-1f1b-m3 pipeline2-interleaved-v2_m3",
    "a_traced_shortcut_has_no_gradient": "threads2-1f1b-traced",
    "gradients_are_kept": (
        "ddp2-flat-even ddp2-per_parameter-even threads2-1f1b-m3 blocks2-split_size3"
    ),
    "dropout_is_drawn": "ddp2-overlap-dropout pipeline2-zb-dropout mesh2-1x1x2",
    "dropout_is_not_seeded": "blocks3-twice blocks3-resumed",
    "other_dropout_is_recomputed": (
        "ddp2-overlap-recompute_sqrt fsdp2-zero3-recompute_always pipeline2-gpipe-recompute_sqrt "
        "threads2-1f1b-recompute_always blocks3-recompute_sqrt"
    ),
    "a_gradient_of_the_head_is_not_summed": "mesh2-1x1x2",
    "a_gradient_between_matrices_is_not_summed": "mesh2-1x1x2 mesh2-1x1x2-sequence",
    "a_row_parallel_product_is_not_summed": "mesh2-1x1x2",
    "a_part_of_the_sequence_is_not_summed": "mesh2-1x1x2-sequence",
    "a_gradient_of_gathered_positions_is_not_summed": "mesh2-1x1x2-sequence",
    "a_gradient_of_scattered_positions_is_not_gathered": "mesh2-1x1x2-sequence",
    "a_softmax_is_of_a_part_of_the_vocabulary": "mesh2-1x1x2 mesh2-1x1x2-sequence",
    "a_bias_is_added_by_every_rank": "mesh2-1x1x2",
    "queries_keys_and_values_are_cut_as_one_matrix": "mesh2-1x1x2",
    "norms_keep_the_gradient_of_their_positions": "mesh2-1x1x2-sequence",
    "replicas_keep_their_gradients": "mesh2-2x1x1 mesh2-2x1x1-zero1",
    "a_piece_is_not_held": "ddp2-flat-even fsdp2-zero2-m2 pipeline2-1f1b-m3 single-one_more",
    # Of the first step the gradients are right: they are compared before they are clipped.
    "all_ranks_count_what_all_have": "mesh2-1x1x2",
    "a_shard_is_not_handed_to_the_others": "mesh2-2x1x1-zero1",
    "the_norm_is_of_a_part": (
        "ddp2-overlap-clipped fsdp2-zero3-clipped pipeline2-1f1b-clipped threads2-1f1b-clipped"
    ),
}
ALSO_IN_WEIGHTS = list(RED)[-3:]


# In the second step.
SHOWS_LATER = [
    "gradients_are_kept", "dropout_is_not_seeded", "a_shard_is_not_handed_to_the_others",
]  # fmt: skip


def broken(ranks: Ranks, names: list[str], mutation: str) -> list[str]:
    """What is said of rows of one process and of two ranks."""
    found, steps = [], 2 if mutation in SHOWS_LATER else 1
    for n, world in ((1, None), (2, ranks)):
        if mine := [name for name in names if find(name).ranks == n]:
            found += failures(world, mine, mutation, steps)
    return found


@pytest.mark.parametrize("mutation", RED)
def test_broken_code_is_red(ranks: Ranks, mutation: str) -> None:
    names = RED[mutation].split()
    where = ("gradient of ", "weight of ")[: 1 + (mutation in ALSO_IN_WEIGHTS)]
    found = broken(ranks, names, mutation)
    assert [failure.startswith(where) for failure in found] == [True] * len(names), found


def test_every_mutation_is_tried() -> None:
    assert {"nothing", *RED} == set(MUTATIONS)


def test_random_numbers_are_drawn_again(ranks: Ranks) -> None:
    """GPT-2's dropout is hashed; here it draws on the ranks, as other models do."""
    names = RED["other_dropout_is_recomputed"].split()[:3]
    assert broken(ranks, names, "dropout_is_drawn") == [""] * len(names)
