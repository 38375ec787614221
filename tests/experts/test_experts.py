"""A layer of experts beside a plain one, in which every expert computes every position.
tests/equivalence checks that models with experts train as one process does."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from experts.dispatch import segments_of, swapped
from experts.layer import Experts, share_experts
from experts.routing import Choice, balance_loss, choose, excess, tally
from pipeline.stage import Stage
from runtime.communicator import Communicator
from tests.pipeline.pipeline_models import Operators, act
from tests.plain_experts import PlainExperts
from tests.ranks import Ranks, nan_in_new_memory, sharing
from tests.remote import on_ranks
from training.optimization import make_optimizer
from training.options import Options
from training.tasks.gpt2 import gpt2_config

C, E, K = 6, 4, 2
# What the first two of a position's numbers add to the logits of the experts: x[0] is 1 in
# positions that all choose 0 and 1, x[1] is 1 in those that never choose 0.
PULL = torch.tensor([[50.0, 40, 0, 0], [-50, 0, 0, 0]])
CASES: dict[
    str, Any
] = {  # rows of each rank, and what pulls them; the choices of each expert, by rank
    "all at one expert": ((5, 0), (4, 0), [[5, 5, 0, 0], [4, 4, 0, 0]]),
    "none of a rank's at an expert": ((3, None), (6, 1), None),
    "a rank without positions": ((0, None), (7, None), None),
    "no positions": ((0, None), (0, None), [[0, 0, 0, 0], [0, 0, 0, 0]]),
}


def like(kind: Any) -> Any:
    """A layer with the weights that all have."""
    config = gpt2_config("gpt2-mini", 64, 8, n_layer=1, n_embd=C, n_head=2, dropout=0.0)
    layer = kind(GPT2MLP(4 * C, config), E, K).double()
    generator = torch.Generator().manual_seed(0)
    for p in layer.parameters():
        p.data.normal_(0, 0.3, generator=generator)
    layer.router.weight.data[:, :2] = PULL.T
    return layer


def rows_of(rank: int, case: str) -> tuple[Tensor, Tensor]:
    """A rank's positions [N, C], and the gradients of what is made of them."""
    N, pull = CASES[case][rank]
    x, dy = torch.randn(2, N, C, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    x[:, :2] = 0
    if pull is not None:
        x[:, pull] = 1
    return x, dy


def on_a_rank(
    rank: int, world_size: int, case: str, share: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """What a rank computes, and of which experts it has gradients."""
    is_narrow = dtype == torch.bfloat16
    layer = like(Experts).to(torch.float32 if is_narrow else dtype)
    with sharing(share), nan_in_new_memory():
        share_experts(layer, Communicator(torch.distributed.group.WORLD))
        x, dy = (t.to(layer.router.weight.dtype) for t in rows_of(rank, case))
        x.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
            y, choice = layer(x)
            y.backward(dy)
    assert len(layer.experts["c_fc"].weight) == E // world_size
    return {
        "y": y.detach(), "x": x.grad, "choices": choice.experts.flatten().bincount(minlength=E),
        **{name: p.grad for name, p in layer.named_parameters()},
    }  # fmt: skip


# Under autocast two products round their operands and results, of 2^-9 each, forward and backward.
ROUNDING = {torch.float64: 1e-12, torch.bfloat16: 2**-6}  # of the largest number of a tensor


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_experts_compute_what_one_does(
    ranks: Ranks, case: str, share: bool, dtype: torch.dtype
) -> None:
    found, plain = ranks.run(on_a_rank, case, share, dtype), like(PlainExperts)
    choices = torch.stack([of_rank["choices"] for of_rank in found])
    if (wanted := CASES[case][2]) is not None:
        assert choices.tolist() == wanted
    if case == "none of a rank's at an expert":
        assert choices[1, 0] == 0 and choices[0, 0] > 0
    inputs = [rows_of(rank, case) for rank in (0, 1)]
    x, dy = (torch.cat(both)[None] for both in zip(*inputs, strict=True))
    y = plain(x.requires_grad_())
    y.backward(dy)
    assert x.grad is not None
    joined = {"y": y[0].detach(), "x": x.grad[0]}
    for name, whole in joined.items():
        assert_close(torch.cat([r[name] for r in found]), whole, dtype)
    for name, p in plain.named_parameters():
        parts = [of_rank[name] for of_rank in found]
        # Each rank has all of its experts' gradients, and of the router's its positions' part.
        own = torch.stack(parts).sum(0) if name == "router.weight" else torch.cat(parts)
        assert p.grad is not None
        assert_close(own, p.grad, dtype)


def assert_close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(
        found.double(), wanted, rtol=0, atol=ROUNDING[dtype] * max(1.0, largest)
    )


def test_of_equal_probabilities_the_lower_number_wins() -> None:
    router = torch.tensor([[0.0, 1], [1, 0], [1, 0], [1, 0], [0, 2]])
    rows = torch.tensor([[1.0, 0], [0, 1], [0, 0]])
    choice = choose(rows, router, 2)
    assert choice.experts.tolist() == [[1, 2], [4, 0], [0, 1]]
    probabilities = (rows @ router.T).softmax(-1)
    assert torch.equal(choice.weights, probabilities.gather(1, choice.experts))  # not of sum 1


def test_a_bias_counts_where_experts_are_chosen_and_nowhere_else() -> None:
    rows, router = torch.tensor([[1.0, 0], [0, 1]]), torch.tensor([[1.0, 0], [0, 1], [0, 0]])
    bias = nn.Parameter(torch.tensor([0.0, 0, 1]))
    choice = choose(rows, router, 2, bias)
    assert choice.experts.tolist() == [[2, 0], [2, 1]]
    assert torch.equal(choice.probabilities, (rows @ router.T).softmax(-1))
    real = torch.tensor([[True, False]])
    chosen, _ = tally(choice, real)
    (bias * excess(chosen, bias)).sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == pytest.approx([1 - 2 / 3, -2 / 3, 1 - 2 / 3])


def test_a_bias_moves_by_the_sign_of_how_busy_its_expert_was_at_a_rate_of_its_own() -> None:
    """Not where that is 0 but for rounding; and its gradient is in no norm."""
    layer, bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(4))
    named = [("a.weight", layer), ("mlp.router.bias", bias)]
    optimizer = make_optimizer(Options(learning_rate=0.5, balance_rate=0.01), named)
    assert [group.get("rate") for group in optimizer.param_groups] == [None, None, 0.01]
    bias.grad = torch.tensor([3.0, -1e-3, 0, 1e-12])
    for group in optimizer.param_groups:
        group["lr"] = group.get("rate", 0.5)
    optimizer.step()
    assert bias.tolist() == pytest.approx([-0.01, 0.01, 0, 0], abs=1e-5)


def test_the_router_computes_in_float32_under_autocast() -> None:
    """Two logits that bf16 takes for equal."""
    router = torch.tensor([[1.0], [1.001]])
    with torch.autocast("cpu", torch.bfloat16):
        choice = choose(torch.ones(1, 1, dtype=torch.bfloat16), router, 1)
    assert choice.experts.tolist() == [[1]] and choice.probabilities.dtype == torch.float32


def test_how_many_rows_go_where() -> None:
    """Each of two ranks has two of four experts."""
    counts = [[1, 2, 3, 4], [5, 6, 0, 8]]  # by sender
    lengths, segments = segments_of(counts, rank=1)
    assert lengths == [[3, 7], [11, 8]]
    assert segments == [(0, 3), (1, 4), (0, 0), (1, 8)]  # from rank 0, from rank 1
    assert swapped(lengths) == [[3, 11], [7, 8]]


def balance_of(probabilities: list[list[float]], lengths: list[int]) -> list[float]:
    """Sequences have equal width, and each position chooses one expert."""
    p = torch.tensor(probabilities, dtype=torch.float64)
    choice = Choice(p, p.argmax(-1)[:, None], p.log())
    n = torch.tensor(lengths)
    real = torch.arange(len(p) // len(lengths)) < n[:, None]
    losses: list[float] = balance_loss(*tally(choice, real), n, top_k=1).tolist()
    return losses


def test_the_balance_loss_is_least_where_experts_are_chosen_alike() -> None:
    even, one = [[0.5, 0.5], [0.4, 0.6]], [[0.9, 0.1], [0.7, 0.3]]
    # 2 (1/2 * 0.45 + 1/2 * 0.55) = 1, and 2 (1 * 0.8 + 0 * 0.2)
    assert balance_of([*even, *one], [2, 2]) == pytest.approx([1.0, 1.6])


def test_the_balance_of_a_sequence_knows_neither_padding_nor_other_sequences() -> None:
    sequence, padding = [[0.9, 0.1], [0.3, 0.7], [0.8, 0.2]], [[0.1, 0.9]]
    alone = balance_of(sequence, [3])
    both = balance_of([*sequence, *padding, *padding * 4], [3, 1])
    assert both == pytest.approx([*alone, 1.8])
    assert balance_of(padding * 2, [0]) == [0]  # a sequence without positions


class Alone(nn.Module):
    """A layer of a pipeline."""

    def __init__(self, layer: Experts) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(x)
        return x + y


def test_a_stage_leaves_the_gradients_of_experts_for_w() -> None:
    """By halves and by whole backwards: the same bits; before W the experts have no gradient."""
    layer: Experts = like(Experts)
    x, dy = torch.randn(2, 2, 5, C, dtype=torch.float64)
    sums = []
    for order in (["F0", "F1", "I0", "I1", "W0", "W1"], ["F0", "F1", "B0", "B1"]):
        stage = Stage(0, nn.Sequential(Alone(layer)), torch.device("cpu"), num_microbatches=2)
        for action in order:
            act(stage, action, x, dy)
            if action == "I1":
                assert {p.shape for p in stage._totals} == {layer.router.weight.shape}
        sums.append(stage.take_gradients())
    halves, whole = sums
    assert len(whole) == 5 and all(torch.equal(halves[p], g) for p, g in whole.items())
    for i in (0, 1):  # autograd's own
        y, _ = layer(x + i)
        (x + i + y).backward(dy)
    for p, gradient in whole.items():
        torch.testing.assert_close(gradient, p.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", ["c_fc.weight", "c_fc.bias", "c_fc."])
def test_frozen_experts_stay_and_cost_no_product(frozen: str) -> None:
    """Neither a gradient of theirs nor memory for it; the others have the same bits. E products
    make the gradient of the c_fc of E experts, each of which is chosen, and a sum that of a bias.
    """
    x, dy = torch.randn(2, 1, 40, C, dtype=torch.float64)
    found = []
    for names in ((), (frozen,)):
        layer: Experts = like(Experts)
        for name, p in layer.named_parameters():
            p.requires_grad_(not any(name.startswith(f"experts.{each}") for each in names))
        stage = Stage(0, nn.Sequential(Alone(layer)), torch.device("cpu"), num_microbatches=1)
        with Operators() as operators:
            for action in ("F0", "B0"):
                act(stage, action, x, dy)
        names_of = {p: name for name, p in layer.named_parameters()}
        sums = {names_of[p]: gradient for p, gradient in stage.take_gradients().items()}
        found.append((sums, operators.products + operators.counts[torch.ops.aten.sum]))
    (whole, all_products), (sums, fewer) = found
    still = {name for name in whole if not name.startswith(f"experts.{frozen}")}
    assert sums.keys() == still and len(whole) == 5
    assert all(torch.equal(gradient, whole[name]) for name, gradient in sums.items())
    assert all_products - fewer == (2 * E if frozen == "c_fc." else E)


class Casts(TorchDispatchMode):
    """Counts them by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = Counter[torch.Size]()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.shapes[args[0].shape] += 1
        return func(*args, **(kwargs or {}))


def test_a_stage_casts_the_weights_of_experts_once_for_all_micro_batches() -> None:
    layer: Experts = like(Experts).float()
    x, dy = torch.randn(2, 2, 5, C)
    stage = Stage(0, nn.Sequential(Alone(layer)), torch.device("cpu"), num_microbatches=2)
    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        for action in ("F0", "F1", "B0", "B1"):
            act(stage, action, x, dy)
    assert [casts.shapes[layer.experts[name].weight.shape] for name in ("c_fc", "c_proj")] == [1, 1]


def test_rows_travel_in_the_type_of_the_products() -> None:
    """Half of the bytes that they would have in the layer's own type."""
    layer: Experts = like(Experts).float()
    sent = []

    def exchange(rows: Tensor, *_: Any) -> Tensor:
        sent.append(rows.dtype)
        return rows

    with patch("experts.layer.exchange", exchange), torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(torch.randn(1, 5, C))
    assert (sent, y.dtype) == ([torch.bfloat16] * 2, torch.float32)


@on_ranks(2)
def test_ranks_must_divide_the_experts(_rank: int, _world_size: int) -> None:
    model = Experts(GPT2MLP(4 * C, gpt2_config("gpt2-mini", 64, 8, n_embd=C, n_head=2)), 3, K)
    with pytest.raises(ValueError, match="3 experts cannot be shared by 2 ranks; 4 can"):
        share_experts(model, Communicator(torch.distributed.group.WORLD))


@on_ranks(2)
def test_shared_experts_are_neither_shared_again_nor_copied(_rank: int, _world_size: int) -> None:
    layer, ranks = like(Experts), Communicator(torch.distributed.group.WORLD)
    assert len(copy.deepcopy(layer).state_dict()) == 5
    share_experts(layer, ranks)
    with pytest.raises(ValueError, match="these experts are shared already, by 2 ranks"):
        share_experts(layer, ranks)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled,.* before it is"):
        copy.deepcopy(layer)


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_choice_of_none_or_of_more_than_there_are_is_refused(top_k: int) -> None:
    config = gpt2_config("gpt2-mini", 64, 8, n_embd=C, n_head=2)
    with pytest.raises(ValueError, match=f"{top_k} of 4 experts for each position: 1 to 4 work"):
        Experts(GPT2MLP(4 * C, config), E, top_k)
    choice = choose(torch.ones(1, C), torch.ones(E, C), K)
    with pytest.raises(ValueError, match=f"{top_k} of 4 experts"):
        choose(torch.ones(1, C), torch.ones(E, C), top_k)
    with pytest.raises(ValueError, match=f"{top_k} of 4 experts"):
        balance_loss(*tally(choice, torch.ones(1, 1)), torch.ones(1), top_k)


def test_rows_of_experts_that_ranks_do_not_divide_are_refused() -> None:
    """The third expert's rows would be sent to nobody."""
    assert segments_of([[1, 2], [3, 4]], 1) == ([[1, 2], [3, 4]], [(0, 2), (0, 4)])
    for counts, rank, words in (
        ([[1, 2, 3]] * 2, 0, "3 experts cannot be shared by 2 ranks; 4 can"),
        ([[1, 2]] * 2, 2, "rank 2 of 2: 0 to 1 work"),
    ):
        with pytest.raises(ValueError, match=words):
            segments_of(counts, rank)


def test_float64_stays_under_autocast() -> None:
    """As everywhere under autocast."""
    x = torch.randn(3, C, dtype=torch.float64)
    wanted, _ = like(Experts)(x)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = like(Experts)(x)
    assert torch.equal(found, wanted)
