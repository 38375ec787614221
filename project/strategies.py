"""The strategies of train.py: a table, and their pages of help.

none
    One process, as `single`; it also prints the loss and the seconds of every step.

    python project/train.py none --num_batches 2
    python project/train.py -n 2 -b 8 none --model gpt2-mini

single
    One process without any exchange. Every other strategy computes what this one does.

    python project/train.py single --model gpt2-mini --n_epochs 4
    python project/train.py single --optimizer sgd --num_batches 20 --profile 5

ddp
    Data parallelism. Every rank holds the whole model and gets a part of each batch. Gradients are
    averaged over the ranks; then all ranks make the same update.

    python project/train.py ddp --num_workers 2 --num_batches 2 --check_weights --check_output
    python project/train.py ddp --model gpt2-mini --experts 8 --top_k 2 --ep 2

    With --experts each block has several MLPs, and a router chooses --top_k of them for each
    position. With --ep 2 two ranks share the experts: each has half of them, and positions travel
    to the ranks that have their experts.

fsdp
    Fully sharded data parallelism. Every rank gets a part of each batch and holds a shard of the
    parameters, gradients and optimizer state. It gathers a layer's parameters just before it uses
    them. --zero 2 leaves the parameters whole, --zero 1 the gradients as well. With --shards 4 four
    neighbouring ranks, e.g. those of a host, share one copy of the model; only the gradients of
    their shards travel between copies.

    python project/train.py fsdp --num_workers 2 --zero 3 --model gpt2-mini
    python project/train.py fsdp --zero 2 --num_batches 2 --optimizer sgd --check_weights

pipeline
    Pipeline parallelism. The layers are cut into stages, and the micro-batches of a step flow
    through them. The schedule is the order in which a rank works on them. It decides how long ranks
    are idle and how many micro-batches they hold.

    python project/train.py pipeline --num_workers 2 --num_microbatches 8 --schedule zb
    python project/train.py pipeline --schedule interleaved --chunks 2 --model gpt2-mini

model
    Model parallelism. The layers are cut into stages, and the whole batch goes through them at
    once: one rank computes, and the others wait. It saves memory. `pipeline` saves time, too.
    (In run_pipeline.py --model_parallel_mode model_parallel micro-batches go one after another.)

    python project/train.py model --num_workers 2 --num_batches 2 --check_weights --check_output
    python project/train.py model --num_workers 4 --balance uniform

tensor
    Tensor parallelism, for GPT-2 only: add --model. Every rank holds a part of each matrix and
    computes with it on the whole batch. The ranks add up their results inside every layer.

    python project/train.py tensor --num_workers 2 --model gpt2-mini
    python project/train.py tensor --num_workers 2 --model gpt2-mini --sequence_parallel

context
    Context parallelism, for GPT-2 only: add --model. Every rank holds the whole model and a part of
    the positions of every sequence. Only attention needs the positions of other ranks. It is for
    long sequences, whose activations fill the memory. --zero shards the model, too.

    python project/train.py context --num_workers 2 --model gpt2-mini
    python project/train.py context --num_workers 2 --model gpt2-mini --attention heads

3d
    All of them at once: --dp replicas of a pipeline of --pp stages, whose matrices are cut into
    --tp parts and whose sequences are cut into --cp parts, on dp x cp x pp x tp processes. --zero
    shards what the replicas hold.

    python project/train.py 3d --dp 2 --pp 2 --tp 2 --zero 1 --model gpt2-mini
    python project/train.py 3d --dp 2 --pp 2 --schedule zb --num_microbatches 8
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from textwrap import dedent
from types import MappingProxyType
from typing import Any, NamedTuple


class Strategy(NamedTuple):
    """A row of the table.

    Attributes:
        axis: the axis of the mesh on which its ranks are; None: several, as the options say.
        whole: whether every rank holds the whole model; else ranks exchange tensors within a step.
        summary: for the list of strategies.
        usual: options whose default differs under this strategy, with that default.
    """

    axis: str | None
    whole: bool
    summary: str
    usual: Mapping[str, Any] = MappingProxyType({})


STRATEGIES = {
    "none": Strategy("dp", True, "one process; prints every step",
                     {"world_size": 1, "print_steps": True}),
    "single": Strategy("dp", True, "one process", {"world_size": 1}),
    "ddp": Strategy("dp", True, "the whole model and a part of each batch on every rank"),
    "fsdp": Strategy("dp", False, "a shard of every layer and a part of each batch on every rank",
                     {"zero": 3}),
    "pipeline": Strategy("pp", False, "some of the layers on each rank, micro-batches flowing "
                         "through them"),
    "model": Strategy("pp", False, "the same with one micro-batch: one rank computes at a time",
                      {"schedule": "gpipe"}),
    "tensor": Strategy("tp", False, "a part of every matrix on each rank (GPT-2)"),
    "context": Strategy("cp", False, "a part of every sequence on each rank (GPT-2)"),
    "3d": Strategy(None, False, "all of them together: --dp 2 --pp 2 --tp 2"),
}  # fmt: skip
ONLY = {
    "dp": "3d", "cp": "3d", "pp": "3d", "tp": "3d", "ep": "ddp fsdp 3d",
    "schedule": "pipeline 3d", "chunks": "pipeline 3d", "balance": "pipeline model 3d",
    "sequence_parallel": "tensor 3d", "attention": "context 3d", "zero": "fsdp context 3d",
    "shards": "fsdp 3d",
    "compile": "none single ddp",
    **dict.fromkeys(("experts", "top_k", "shared_experts", "balance_by", "balance_coefficient",
                     "balance_rate", "router_z"), "none single ddp fsdp pipeline model context 3d"),
}  # fmt: skip
"""The options that only some strategies have, and those strategies."""


def owners(option: str) -> list[str]:
    """The strategies that have an option."""
    return ONLY[option].split() if option in ONLY else [*STRATEGIES]


def page_of(strategy: str) -> str:
    """What --help says of a strategy."""
    _, *parts = re.split(r"^(\w+)\n", __doc__ or "", flags=re.MULTILINE)
    return dedent(dict(zip(parts[::2], parts[1::2], strict=True))[strategy])
