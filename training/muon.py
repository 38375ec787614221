"""Muon: every matrix of a block moves in all its directions alike, wherever its pieces lie.

Problem. The momentum M of a matrix has a few strong directions: in M = U S V', S falls off quickly.
AdamW, which scales each element by itself, moves the weight along these directions alone. Muon
replaces M by U V'. For that, one rank needs the whole matrix. Under ZeRO, tensor parallelism and
experts no rank has it.

Idea. U V' comes from products alone: divided by its norm, M has singular values up to 1, and five
rounds of x -> a x + b (x x') x + c (x x')^2 x bring all of them near 1 (Newton-Schulz).

    momentum   on every rank, element by element, of the pieces that it holds
    exchange   the pieces of a matrix go to one rank, its owner
    product    the owner makes it whole, and computes
    exchange   the result's pieces go to all ranks that hold these pieces of the weight
    update     on every rank:  w <- w (1 - rate * decay) - rate * 0.2 sqrt(longer side) * piece

Matrices are dealt out over the ranks that have the same layers: each rank computes its share of
them, preferably those that it holds most of. Query, key and value are three matrices side by side
in one parameter, experts are matrices on top of each other, and each is orthogonalised by itself: a
direction of all of them together means nothing. 0.2 sqrt(longer side) gives the update the size of
AdamW's, so one learning rate and one decay serve both. AdamW updates the embedding, head, router,
biases and norms; this and the decay of weights overlap with the second exchange. Matrices of the
same size, up to transposition, share batched products.

Cost. 5 (4 m m n + 2 m m m) flops for a matrix of m rows and n >= m columns: some 4 m / N of the
flops of a step with N positions, divided by the number of ranks. State: one number per element,
where AdamW has two. Bytes of the exchanges, if W ranks hold G bytes of matrices: under data
parallelism a rank sends nothing to owners and gets G (W-1)/W of results, where AdamW sends nothing;
under ZeRO up to G/W each way, in addition to the G (W-1)/W of gathering the new weights. Numbers
travel in the type of the products: half of that in bf16.

Papers: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al.,
"Muon is scalable for LLM training", 2025 (the size of the update, and decay).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

COEFFICIENTS = 3.4445, -4.775, 2.0315  # a, b, c: steep at 0; singular values become 0.7 to 1.2
NS_ROUNDS = 5
SMALLEST = 1e-7  # norm that a matrix is divided by
IN_CACHE = 1 << 19  # elements of a batch of matrices on a CPU
MATRICES = "attn.c_attn.weight", "c_proj.weight", "c_fc.weight"  # in the blocks of a GPT-2

Slices = tuple[slice, ...]


class Matrix(NamedTuple):
    """One of the matrices of a parameter: its number, and its sides."""

    name: str
    number: int
    rows: int
    columns: int

    @property
    def sides(self) -> tuple[int, int]:
        """The shorter, and the longer."""
        return min(self.rows, self.columns), max(self.rows, self.columns)

    @property
    def work(self) -> int:
        """The flops of its products, up to a factor."""
        m, n = self.sides
        return m * m * (2 * n + m)

    def of(self, wide: Tensor) -> Tensor:
        """A view of this matrix, from `wide`, which has its shorter side first."""
        return wide if self.rows <= self.columns else wide.mT


class Piece(NamedTuple):
    """A rectangle of a matrix; `rows` and `columns` are ranges."""

    matrix: Matrix
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def place(self) -> Slices:
        """Where it is in the matrix."""
        return slice(*self.rows), slice(*self.columns)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


def is_matrix_of_block(name: str) -> bool:
    """Whether a parameter is Muon's."""
    return name.endswith(MATRICES)


def pieces_of(x: Any) -> dict[Piece, Slices]:
    """The pieces of matrices in what a rank holds of a parameter (x, see `Muon.arrange`), and where
    in it each is. Experts [E, K, M] have E matrices, c_attn [C, 3C] has three."""
    *stack, rows, columns = x.shape
    columns //= 3 if x.name.endswith("c_attn.weight") else 1
    if stack:
        begins: list[tuple[int, ...]] = [(e, 0, 0) for e in range(stack[0])]
    else:
        begins = [(0, column) for column in range(0, x.shape[-1], columns)]
    pieces = {}
    for number, begin in enumerate(begins):
        size = (*(1 for _ in stack), rows, columns)
        sides = zip(x.offsets, x.tensor.shape, begin, size, strict=True)
        ranges = [(max(at, o), min(at + n, o + m)) for at, n, o, m in sides]
        if all(first < end for first, end in ranges):
            of_matrix = [(f - o, e - o) for (f, e), o in zip(ranges, begin, strict=True)][-2:]
            place = [slice(f - at, e - at) for (f, e), at in zip(ranges, x.offsets, strict=True)]
            pieces[Piece(Matrix(x.name, number, rows, columns), *of_matrix)] = tuple(place)
    return pieces


def orthogonalized(x: Tensor) -> Tensor:
    """Matrices [K, m, n], m <= n, with all singular values near 1, computed in their own type. They
    share batched products: a small matrix alone keeps no core busy."""
    a, b, c = COEFFICIENTS
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    for _ in range(NS_ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def owners_of(pieces: Sequence[Iterable[Piece]]) -> dict[Matrix, int]:
    """The rank that computes each matrix: of those whose share of the work has room for it, the one
    that holds most of it, and among equals the least busy. `pieces`: what each rank holds."""
    elements = defaultdict[Matrix, list[int]](lambda: [0] * len(pieces))
    for rank, of_rank in enumerate(pieces):
        for piece in of_rank:
            elements[piece.matrix][rank] += math.prod(piece.shape)
    busy, share = [0] * len(pieces), sum(matrix.work for matrix in elements) / len(pieces)
    owners = {}
    for matrix in sorted(elements, key=lambda matrix: (-matrix.work, matrix)):  # large ones first
        least = min(busy)
        fits = [r for r, w in enumerate(busy) if w == least or w + matrix.work <= share]
        owner = max(fits, key=lambda rank: (elements[matrix][rank], -busy[rank]))
        owners[matrix], busy[owner] = owner, busy[owner] + matrix.work
    return owners


class Delivery:
    """Pieces that go from rank to rank, the same in every step.

    Args:
        messages: sender, receiver and piece; the same on all ranks.
        like: an empty tensor with the type and device of what is sent.
    """

    def __init__(
        self, messages: Iterable[tuple[int, int, Piece]], ranks: Any, like: Tensor
    ) -> None:
        self._ranks, self._like = ranks, like
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._lengths = [[0] * size for _ in range(size)]
        in_order = sorted(messages)
        for sender, receiver, piece in in_order:
            self._lengths[sender][receiver] += math.prod(piece.shape)
        self._outgoing = [piece for sender, _, piece in in_order if sender == rank]
        self._incoming = [piece for _, receiver, piece in in_order if receiver == rank]

    def start(self, values: Mapping[Piece, Tensor]) -> Callable[[], dict[Piece, Tensor]]:
        """Starts to send this rank's pieces. The returned function waits for those of others."""
        if self._ranks is None or not any(map(any, self._lengths)):
            return dict
        flat = torch.cat([self._like, *(values[piece].flatten() for piece in self._outgoing)])
        finish = self._ranks.start_all_to_all(flat, self._lengths)
        sizes = [math.prod(piece.shape) for piece in self._incoming]

        def receive() -> dict[Piece, Tensor]:
            parts = zip(self._incoming, finish().split(sizes), strict=True)
            return {piece: part.view(piece.shape) for piece, part in parts}

        return receive


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of blocks, AdamW for all else. Call `arrange` before the first step. A
    missing gradient counts as zeros.

    Args:
        matrices: what this rank holds of each parameter with matrices.
        others: AdamW's groups, with their options.
        momentum: the part of the mean of gradients that each step keeps.
        dtype: the type in which matrices are computed and sent.
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
        # It has the same groups, whose rates are set here; `step` gives it the state.
        self._adamw = torch.optim.AdamW(self.param_groups[1:], lr, fused=True)
        self._dtype = dtype
        self._held: list[tuple[Any, dict[Piece, Slices]]] | None = None  # until `arrange`

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "Muon can be neither copied nor pickled, since ranks have dealt its matrices out: make "
            "one of the copied parameters, and load this one's state_dict()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group for AdamW, which fills in its own defaults."""
        super().add_param_group(param_group)
        if "_adamw" in vars(self):  # else the groups are still being made
            self._adamw.add_param_group(self.param_groups[-1])

    def arrange(self, held: Iterable[Any], device: torch.device, ranks: Any = None) -> None:
        """Deals the matrices out, by what each rank holds of them.

        Args:
            held: rectangles of parameters, as `training.layouts.layout.Held` has them.
            ranks: a `runtime.communicator.Communicator` of those with the same layers, whole or in
                pieces, which all call it together. None: this rank alone.
        """
        own, rank_here = {*self.param_groups[0]["params"]}, 0 if ranks is None else ranks.rank
        self._held = [(x, pieces_of(x)) for x in held if x.parameter in own]
        by_rank: list[Any] = [[piece for _, pieces in self._held for piece in pieces]]
        if ranks is not None:
            by_rank *= ranks.size
            dist.all_gather_object(by_rank, by_rank[0], ranks.group)
        holders = defaultdict[Piece, list[int]](list)
        for rank, pieces in enumerate(by_rank):
            for piece in pieces:
                holders[piece].append(rank)
        owners = owners_of(by_rank)
        there, back = [], []
        self._owned = defaultdict[tuple[int, int], dict[Matrix, list[Piece]]](dict)  # by sides
        for piece, has in holders.items():
            matrix, owner = piece.matrix, owners[piece.matrix]
            there += [(has[0], owner, piece)] if owner not in has else []
            back += [(owner, rank, piece) for rank in has if rank != owner]
            if owner == rank_here:
                self._owned[matrix.sides].setdefault(matrix, []).append(piece)
        self._like = torch.empty(0, dtype=self._dtype, device=device)
        self._to_owners, self._from_owners = (
            Delivery(messages, ranks, self._like) for messages in (there, back)
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """An update; all ranks call it together. Raises RuntimeError before `arrange`."""
        assert closure is None
        if self._held is None:
            raise RuntimeError("call arrange() before the first step: it deals the matrices out")
        # In every step, since `load_state_dict` makes new groups and a new state.
        self._adamw.param_groups, self._adamw.state = self.param_groups[1:], self.state
        group = self.param_groups[0]
        directions = {p: self._direction(p, group["momentum"]) for p in group["params"]}
        values = {
            piece: _at(x.of(directions[x.parameter]), place)
            for x, pieces in self._held
            for piece, place in pieces.items()
        }
        updates = self._computed(values | self._to_owners.start(values)())
        receive = self._from_owners.start(updates)
        self._adamw.step()
        for p in group["params"]:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        updates |= receive()
        for x, pieces in self._held:
            for piece, place in pieces.items():
                size = 0.2 * piece.matrix.sides[1] ** 0.5
                _at(x.tensor, place).add_(updates[piece], alpha=-group["lr"] * size)

    def _direction(self, p: nn.Parameter, momentum: float) -> Tensor:
        """The mean of p's gradients, as it would be after one more such gradient (Nesterov), in the
        type of the products."""
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        average = self.state[p]["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum).to(self._dtype)

    def _computed(self, values: Mapping[Piece, Tensor]) -> dict[Piece, Tensor]:
        """The pieces of all matrices that this rank owns, orthogonalised."""
        results: dict[Piece, Tensor] = {}
        for sides, matrices in self._owned.items():
            stack = self._like.new_empty(len(matrices), *sides)
            for wide, (matrix, pieces) in zip(stack, matrices.items(), strict=True):
                for piece in pieces:
                    matrix.of(wide)[piece.place] = values[piece]
            # On a CPU a batch is as many matrices as its cache holds, but at least two: one alone
            # takes up to 1.7 times as long. On a GPU a single batch needs fewer launches.
            batches = 1 if stack.is_cuda else min(len(stack) // 2, stack.numel() // IN_CACHE)
            for batch in stack.tensor_split(max(batches, 1)):
                batch.copy_(orthogonalized(batch))
            for wide, (matrix, pieces) in zip(stack, matrices.items(), strict=True):
                whole = matrix.of(wide).contiguous()  # adding it transposed takes 5 times as long
                results |= {piece: whole[piece.place] for piece in pieces}
        return results


def _at(t: Tensor, place: Slices) -> Tensor:
    """A view of a piece of a rectangle, [rows, columns]. Of several experts it is one expert's."""
    return t[place].flatten(0, -2)
