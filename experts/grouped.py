"""The products of all experts in one kernel, on a GPU.

Problem. A product for each expert and sender is E launches for each product of a layer, most of
them too small to fill a GPU.

Idea. Rows are sorted by expert once, after they have arrived; then `torch._grouped_mm` multiplies
all of them in one launch, and the host need not even know how many rows an expert has:

    arrived    rows of experts 0 1 from rank 0 | of 0 1 from rank 1
    sorted     of 0 from both ranks | of 1 from both ranks     ends = [rows of 0, rows of 0 and 1]

Its kernels are for bf16 on compute capability 9.0 and later, with rows of a multiple of 16 bytes;
elsewhere torch would copy `ends` to the host and multiply one by one, which layer.py does without
that wait. On a CPU a product for each segment, as it lies, is fastest (docs/mathematics.md).

Shapes: R rows, E experts of this rank, K features in, M features out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def may_group(x: Tensor, *features: int) -> bool:
    """Whether one kernel multiplies rows like x [R, K] by weights with these `features`."""
    return (
        x.device.type == "cuda"
        and x.dtype == torch.bfloat16
        and len(x) > 0
        and all(n % 8 == 0 for n in features)
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )


def order_by_expert(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """How to sort `rows` that have arrived, [R], and where each expert's rows end then, [E].

    Args:
        counts: [senders, E], how many rows of each sender are for each of this rank's experts.
    """
    experts = torch.arange(counts.size(1), device=counts.device).expand_as(counts).flatten()
    of_rows = experts.repeat_interleave(counts.flatten(), output_size=rows)  # no wait
    return of_rows.argsort(stable=True), counts.sum(0).cumsum(0).to(torch.int32)


class Grouped:
    """A `runtime.linear.Product` of rows that lie by expert, by one weight [E, K, M] of all."""

    torch_differentiates = False  # not on every device

    def __init__(self, ends: Tensor) -> None:
        self._ends = ends

    def y(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """[R, K] to [R, M]."""
        assert b is not None
        return torch._grouped_mm(x, w, offs=self._ends) + b.index_select(0, self._expert_of(x))

    def dx(self, dy: Tensor, w: Tensor) -> Tensor:
        """[R, M] to [R, K]."""
        return torch._grouped_mm(dy.contiguous(), w.transpose(1, 2), offs=self._ends)

    def add_dw(self, total: Tensor, x: Tensor, dy: Tensor, fresh: bool) -> None:
        """x' dy of each expert's rows, to [E, K, M]."""
        dw = torch._grouped_mm(x.t(), dy.contiguous(), offs=self._ends)
        is_empty = self._ends.diff(prepend=self._ends.new_zeros(1)) == 0
        dw.masked_fill_(is_empty[:, None, None], 0)  # some kernels write nothing there
        (total.copy_ if fresh else total.add_)(dw)

    def add_db(self, total: Tensor, dy: Tensor, fresh: bool) -> None:
        """The sum of each expert's rows, to [E, M]: a product with ones and zeros, in fp32."""
        numbers = torch.arange(len(total), device=dy.device)
        is_own = self._expert_of(dy) == numbers[:, None]  # E R
        (total.copy_ if fresh else total.add_)(is_own.to(dy.dtype) @ dy)

    def _expert_of(self, rows: Tensor) -> Tensor:
        """[R]: the number of experts that end before each row, or at it."""
        numbers = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
        return torch.bucketize(numbers, self._ends, right=True)
