"""The strategies of train.py. `python project/train.py STRATEGY --help` prints the strategy's part
of this text, and its options.

single
    One process without any exchange. Every other strategy computes what this one does.

    python project/train.py single --model gpt2-mini --n_epochs 4
    python project/train.py single --optimizer sgd --num_batches 20 --profile 5

ddp
    Data parallelism. Every rank holds the whole model and gets a part of each batch. Gradients are
    averaged over the ranks while backward still runs; then all ranks make the same update.

    python project/train.py ddp --num_workers 2 --num_batches 2 --check_weights --check_output
    python project/train.py ddp --model gpt2-mini --warmup_steps 10 --lr_scheduler cosine

fsdp
    Fully sharded data parallelism. Every rank gets a part of each batch and holds a shard of the
    parameters, gradients and optimizer state. It gathers a layer's parameters just before it uses
    them. --zero 2 leaves the parameters whole, --zero 1 the gradients, too.

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

    python project/train.py model --num_workers 2 --num_batches 2 --check_weights --check_output
    python project/train.py model --num_workers 4 --balance uniform

tensor
    Tensor parallelism, of GPT-2 alone: it needs --model. Every rank holds a part of each matrix and
    computes with it on the whole batch. The ranks add up their results inside every layer.

    python project/train.py tensor --num_workers 2 --model gpt2-mini
    python project/train.py tensor --num_workers 2 --model gpt2-mini --sequence_parallel

3d
    All of them at once: --dp replicas of a pipeline of --pp stages, whose matrices are cut into
    --tp parts, on dp x pp x tp processes. --zero shards what the replicas hold.

    python project/train.py 3d --dp 2 --pp 2 --tp 2 --zero 1 --model gpt2-mini
    python project/train.py 3d --dp 2 --pp 2 --schedule zb --num_microbatches 8
"""

from __future__ import annotations

import re
from textwrap import dedent

from training.options import ONLY, Options

# Options of which a strategy leaves no choice.
DECIDED = {"single": "world_size master_port", "model": "num_microbatches", "tensor": "vgg_width"}


def lacking(strategy: str) -> set[str]:
    """The names of the options that --help of a strategy leaves out."""
    by_strategy = [row for row in ONLY if row.has is None]
    others = [row.names for row in by_strategy if not row.fits(Options(strategy=strategy))]
    return {*" ".join([*others, DECIDED.get(strategy, "")]).split()}


_, *_parts = re.split(r"^(\w+)\n", __doc__ or "", flags=re.MULTILINE)
PAGES = {
    name: (dedent(page), lacking(name))
    for name, page in zip(_parts[::2], _parts[1::2], strict=True)
}
"""What --help says of a strategy, and the options that it leaves out."""
