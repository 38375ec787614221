"""Muon: every matrix of a block moves in all its directions alike, wherever its pieces lie.

Problem. A gradient's momentum M is a matrix with a few strong directions, and AdamW, which scales
each element by itself, moves a weight along them alone: M = U S V', and S falls off quickly. Muon
puts U V' in the place of M. For that one rank needs the whole matrix. Under ZeRO, tensor
parallelism and experts no rank has it.

Idea. U V' comes from products alone: divided by its norm, M has singular values up to 1, and five
rounds of x -> a x + b (x x') x + c (x x')^2 x bring all of them near 1 (Newton-Schulz).

    momentum   on every rank, element by element, of the pieces that it holds
    exchange   the pieces of a matrix go to one rank, its owner
    product    the owner makes it whole, and computes
    exchange   the result's pieces go to all ranks that hold these pieces of the weight
    update     on every rank:  w <- w (1 - rate * decay) - rate * 0.2 sqrt(longer side) * piece

Matrices are dealt out over the ranks that have the same layers: each computes its share of the
products, those that it holds most of. Query, key and value are three matrices side by side in one
parameter, experts are matrices on top of each other, and each is orthogonalised by itself: a
direction of all of them together means nothing. 0.2 sqrt(longer side) gives the update the size of
AdamW's, so one learning rate and one decay serve both. Embedding, head, router, biases and norms
are AdamW's; it runs while pieces travel to their owners.

Cost. 5 (4 m m n + 2 m m m) flops for a matrix of m rows and n >= m columns, some 4 m / N of those
of a step that sees N positions, divided by the ranks. State: one number per element, AdamW has two.
Bytes of an exchange, G in all matrices, W ranks: a rank that holds whole copies (data parallelism)
sends nothing to owners and gets G (W-1)/W of results, where AdamW sends nothing; under ZeRO up to
G/W each way beside the G (W-1)/W of gathering the new weights. In the type of the products: half of
that in bf16.

Papers: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al.,
"Muon is scalable for LLM training", 2025 (the size of the update, and decay).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

COEFFICIENTS = 3.4445, -4.775, 2.0315  # a, b, c: steep at 0; what they lead to is 0.7 to 1.2
NS_ROUNDS = 5
SMALLEST = 1e-7  # that a matrix is divided by
MATRICES = "attn.c_attn.weight", "c_proj.weight", "c_fc.weight"  # in the blocks of a GPT-2

Matrix = tuple[str, int]
"""The name of a parameter, and which of its matrices."""
Slices = tuple[slice, ...]


class Piece(NamedTuple):
    """A rectangle of a matrix; `rows` and `columns` are ranges."""

    matrix: Matrix
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def place(self) -> Slices:
        """Where in the matrix."""
        return slice(*self.rows), slice(*self.columns)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


def is_matrix_of_block(name: str) -> bool:
    """Whether a parameter is Muon's."""
    return name.endswith(MATRICES)


def matrices_in(name: str, shape: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The matrices of a parameter, each as where it begins and how large it is: c_attn [C, 3C] has
    three, experts [E, K, M] have E."""
    *stack, rows, columns = shape
    if stack:
        return [((e, 0, 0), (1, rows, columns)) for e in range(stack[0])]
    n = 3 if name.endswith("c_attn.weight") else 1
    return [((0, k * columns // n), (rows, columns // n)) for k in range(n)]


def pieces_of(x: Any) -> dict[Piece, Slices]:
    """The pieces of matrices in what a rank holds of a parameter (see `Muon.arrange`), and where in
    that each is."""
    pieces = {}
    for number, (firsts, sizes) in enumerate(matrices_in(x.name, x.shape)):
        sides = zip(x.offsets, x.tensor.shape, firsts, sizes, strict=True)
        ranges = [(max(at, o), min(at + n, o + size)) for at, n, o, size in sides]
        if all(begin < end for begin, end in ranges):
            rows, columns = [(b - o, e - o) for (b, e), o in zip(ranges, firsts, strict=True)][-2:]
            inside = zip(ranges, x.offsets, strict=True)
            place = tuple(slice(begin - at, end - at) for (begin, end), at in inside)
            pieces[Piece((x.name, number), rows, columns)] = place
    return pieces


def orthogonalized(x: Tensor) -> Tensor:
    """A matrix with all singular values near 1, computed in its own type."""
    if x.size(0) > x.size(1):
        return orthogonalized(x.mT).mT
    a, b, c = COEFFICIENTS
    x = x / x.norm().clamp(min=SMALLEST)
    for _ in range(NS_ROUNDS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def owners_of(
    sizes: Mapping[Matrix, tuple[int, int]], pieces: Sequence[Iterable[Piece]]
) -> dict[Matrix, int]:
    """The rank that computes each matrix: of those whose share of the work has room for it, the one
    that holds most of it, and of equal ones the least busy.

    Args:
        sizes: of every matrix, rows and columns.
        pieces: that each rank holds.
    """
    elements: dict[Matrix, list[int]] = {matrix: [0] * len(pieces) for matrix in sizes}
    for rank, of_rank in enumerate(pieces):
        for piece in of_rank:
            elements[piece.matrix][rank] += piece.shape[0] * piece.shape[1]
    work = {matrix: min(size) ** 2 * (2 * max(size) + min(size)) for matrix, size in sizes.items()}
    busy, share = [0] * len(pieces), sum(work.values()) / len(pieces)
    owners = {}
    for matrix in sorted(sizes, key=lambda matrix: -work[matrix]):  # the large ones first
        least = min(busy)
        fits = [r for r, w in enumerate(busy) if w == least or w + work[matrix] <= share]
        owner = max(fits, key=lambda rank: (elements[matrix][rank], -busy[rank]))
        owners[matrix], busy[owner] = owner, busy[owner] + work[matrix]
    return owners


class Delivery:
    """Pieces that go from rank to rank, the same in every step.

    Args:
        messages: sender, receiver and piece; the same on all ranks.
        like: an empty tensor of what is sent.
    """

    def __init__(
        self, messages: Iterable[tuple[int, int, Piece]], ranks: Any, like: Tensor
    ) -> None:
        self._ranks, self._like = ranks, like
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._lengths = [[0] * size for _ in range(size)]
        in_order = sorted(messages)
        for sender, receiver, piece in in_order:
            self._lengths[sender][receiver] += piece.shape[0] * piece.shape[1]
        self._outgoing = [piece for sender, _, piece in in_order if sender == rank]
        self._incoming = [piece for _, receiver, piece in in_order if receiver == rank]

    def start(self, values: Mapping[Piece, Tensor]) -> Callable[[], dict[Piece, Tensor]]:
        """Sends this rank's pieces; what is returned waits for those of the others."""
        if self._ranks is None or not any(map(any, self._lengths)):
            return dict
        flat = torch.cat([self._like, *(values[piece].flatten() for piece in self._outgoing)])
        finish = self._ranks.start_all_to_all(flat, self._lengths)
        sizes = [rows * columns for rows, columns in (piece.shape for piece in self._incoming)]

        def receive() -> dict[Piece, Tensor]:
            parts = zip(self._incoming, finish().split(sizes), strict=True)
            return {piece: part.view(piece.shape) for piece, part in parts}

        return receive


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of blocks, AdamW for all else. `arrange` comes before the first step. A
    matrix without a gradient counts as having zeros.

    Args:
        matrices: what this rank holds of each parameter with matrices.
        others: AdamW's groups, with their options.
        momentum: what the mean of gradients keeps in each step.
        dtype: in which matrices are computed and sent.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[dict[str, Any]],
        lr: float,
        weight_decay: float,
        momentum: float,
        dtype: torch.dtype,
    ) -> None:
        own = {"params": matrices, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([own, *others], {"lr": lr})
        # Of the same groups, whose rates are set here, and with the same state.
        self._adamw = torch.optim.AdamW(self.param_groups[1:], lr, fused=True)
        self._adamw.state = self.state
        self._dtype = dtype

    def arrange(self, held: Iterable[Any], device: torch.device, ranks: Any = None) -> None:
        """Deals the matrices out, by what each rank holds of them.

        Args:
            held: rectangles of parameters, as `training.layouts.layout.Held` has them.
            ranks: a `runtime.communicator.Communicator` of those with the same layers, whole or in
                pieces, which all call it together. None: this rank alone.
        """
        own, rank_here = {*self.param_groups[0]["params"]}, 0 if ranks is None else ranks.rank
        here = [x for x in held if x.parameter in own]
        self._held = [(x, pieces_of(x)) for x in here]
        self._sizes: dict[Matrix, tuple[int, int]] = {
            (x.name, k): (size[-2], size[-1])
            for x in here
            for k, (_, size) in enumerate(matrices_in(x.name, x.shape))
        }
        pieces_here = [piece for _, pieces in self._held for piece in pieces]
        by_rank: list[Any] = [(pieces_here, self._sizes)]
        if ranks is not None:
            by_rank *= ranks.size
            dist.all_gather_object(by_rank, by_rank[0], ranks.group)
        holders = defaultdict[Piece, list[int]](list)
        for rank, (pieces, sizes) in enumerate(by_rank):
            self._sizes = {**self._sizes, **sizes}
            for piece in pieces:
                holders[piece].append(rank)
        in_order = dict(sorted(self._sizes.items()))  # the same on all ranks
        owners = owners_of(in_order, [pieces for pieces, _ in by_rank])
        self._owned: dict[Matrix, list[Piece]] = {
            matrix: [piece for piece in holders if piece.matrix == matrix]
            for matrix, owner in owners.items()
            if owner == rank_here
        }
        there, back = [], []
        for piece, has in holders.items():
            owner = owners[piece.matrix]
            there += [(has[0], owner, piece)] if owner not in has else []
            back += [(owner, rank, piece) for rank in has if rank != owner]
        self._like = torch.empty(0, dtype=self._dtype, device=device)
        self._to_owners, self._from_owners = (
            Delivery(messages, ranks, self._like) for messages in (there, back)
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """An update; all ranks call it together."""
        assert closure is None
        group = self.param_groups[0]
        directions = self._directions(group["params"], group["momentum"])
        values = {
            piece: _at(x.of(directions[x.parameter]), place).to(self._dtype)
            for x, pieces in self._held
            for piece, place in pieces.items()
        }
        receive = self._to_owners.start(values)
        self._adamw.step()
        updates = self._computed(values | receive())
        updates |= self._from_owners.start(updates)()
        if group["params"]:
            torch._foreach_mul_(group["params"], 1 - group["lr"] * group["weight_decay"])
        for x, pieces in self._held:
            for piece, place in pieces.items():
                size = 0.2 * max(self._sizes[piece.matrix]) ** 0.5
                _at(x.tensor, place).add_(updates[piece], alpha=-group["lr"] * size)

    def _directions(self, parameters: list[nn.Parameter], momentum: float) -> dict[Any, Tensor]:
        """The means of gradients, by parameter, as they will be after one more such gradient
        (Nesterov)."""
        if not parameters:
            return {}
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        means = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, means, momentum)
        return dict(zip(parameters, ahead, strict=True))

    def _computed(self, values: Mapping[Piece, Tensor]) -> dict[Piece, Tensor]:
        """The pieces of all matrices that this rank owns, orthogonalised."""
        results: dict[Piece, Tensor] = {}
        for matrix, pieces in self._owned.items():
            whole = self._like.new_empty(self._sizes[matrix])
            for piece in pieces:
                whole[piece.place] = values[piece]
            whole = orthogonalized(whole)
            results |= {piece: whole[piece.place] for piece in pieces}
        return results


def _at(t: Tensor, place: Slices) -> Tensor:
    """A piece of a rectangle: a view, [rows, columns]; of several experts it is one's."""
    return t[place].flatten(0, -2)
