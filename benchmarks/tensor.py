"""Tensor parallelism: a step beside PyTorch's, and the head with its loss.

Two ranks, one core each; contestants live in the same two processes and take turns.

- A step of GPT-2 (4 blocks of width 768), forward, backward and update, beside the same model under
  `torch.distributed.tensor.parallel.parallelize_module` with `loss_parallel`, both with and without
  sequence parallelism; and beside one rank with one core, while the other waits.
- The head and its loss at the published vocabulary, beside gathering all logits on every rank:
  seconds, and the peak of resident memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import GPT2LMHeadModel

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, write_rows
from benchmarks.plain_gpt2 import build_model
from runtime.communicator import Communicator
from runtime.mesh import make_mesh
from tensor_parallel.collectives import replicate
from tensor_parallel.loss import head_loss
from training.launch.launch import launch
from training.launch.world import World
from training.layouts.layout import Setup
from training.layouts.stages import Staged
from training.options import Options
from training.tasks.gpt2 import Sequences, gpt2_config, gpt2_layers, initializer, loss_of_targets
from training.tasks.task import Step

TITLE = "Tensor parallelism, GPT-2 with 4 blocks of width 768, a core per rank"
ROUNDS = 5
BLOCKS, WIDTH, HEADS, VOCABULARY = 4, 768, 12, 4096
B, T = 8, 128
PUBLISHED = 50257
MIB = 2**20


def _config() -> Any:
    size = {"n_layer": BLOCKS, "n_embd": WIDTH, "n_head": HEADS}
    config = gpt2_config("gpt2", VOCABULARY, T, dropout=0.0, **size)
    config.tie_word_embeddings = False  # so that the model of plain modules below is the same
    return config


def _batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, weights, keys, labels; every position has a target."""
    ids = torch.randint(VOCABULARY, (B, T + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], torch.ones(B, T, dtype=torch.long), torch.arange(B), ids[:, 1:]


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-4, fused=True)


class _One:
    """The whole model in one process."""

    def __init__(self) -> None:
        self.net = nn.Sequential(*gpt2_layers(build_model(_config(), seed=0)))
        self.optimizer = _adamw(self.net.parameters())

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        ids, weights, keys, labels = _batch()
        loss = (
            loss_of_targets(self.net(Sequences(ids, weights, keys)), labels.flatten()) / ids.numel()
        )
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class _Task:
    """What the layout asks of a task."""

    blocks = (3, 2, 2, 3)  # the layers of each
    loss = staticmethod(loss_of_targets)

    def __init__(self) -> None:
        self.initialize = initializer(_config(), seed=0)

    def skeleton(self) -> Any:
        """The model without values."""
        with torch.device("meta"):
            return GPT2LMHeadModel(_config())

    def layers(self, model: Any) -> list[nn.Module]:
        """Its layers."""
        return gpt2_layers(model)


class _Ours:
    """The layout of `train.py tensor`."""

    def __init__(self, world: World, sequence_parallel: bool) -> None:
        task: Any = _Task()
        mesh = make_mesh({"dp": 1, "pp": 1, "tp": world.world_size}, 300.0)
        args = Options(strategy="tensor", num_microbatches=1, sequence_parallel=sequence_parallel)
        self.model = Staged(task, world, Setup(args, _adamw), mesh)

    def step(self) -> Tensor:
        (optimizer,) = self.model.optimizers
        optimizer.zero_grad()
        ids, weights, keys, labels = _batch()
        inputs, size = [Sequences(ids, weights, keys)], ids.numel()
        loss = self.model.backward(Step(inputs, [labels.flatten()], size, size, size))
        optimizer.step()
        return loss / size


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    """A block of GPT-2 of plain modules, as `parallelize_module` wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), _Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(1024, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(BLOCKS)))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.blocks(self.wte(ids) + self.wpe(positions))
        return self.head(self.ln_f(x))


class _Torch:
    """PyTorch's, from the same initial weights."""

    def __init__(self, sequence_parallel: bool) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        net = _Net()
        _copy_weights(net, build_model(_config(), seed=0))
        between: Any = Shard(1) if sequence_parallel else Replicate()
        column, row = ColwiseParallel(), RowwiseParallel(output_layouts=between)
        gathered = PrepareModuleInput(
            input_layouts=(between,), desired_input_layouts=(Replicate(),)
        )
        setup: dict[str, Any] = {
            "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "head": ColwiseParallel(
                input_layouts=between, output_layouts=Shard(-1), use_local_output=False
            ),
        }
        for k in range(BLOCKS):
            at = f"blocks.{k}"
            setup |= {f"{at}.attn.{name}": column for name in ("q", "k", "v")}
            setup |= {f"{at}.attn.o": row, f"{at}.mlp.0": column, f"{at}.mlp.2": row}
            if sequence_parallel:
                setup |= {f"{at}.{name}": SequenceParallel() for name in ("ln_1", "ln_2")}
                setup |= {f"{at}.attn": gathered, f"{at}.mlp": gathered}
        if sequence_parallel:
            setup["ln_f"] = SequenceParallel()
        self.net = parallelize_module(net, mesh, setup)
        whole = torch.arange(T).expand(B, T)
        self.positions = whole.chunk(2, 1)[dist.get_rank()] if sequence_parallel else whole
        self.wpe = net.wpe.weight if sequence_parallel else None
        ps = list(self.net.parameters())
        kinds = [[p for p in ps if isinstance(p, DTensor) is cut] for cut in (True, False)]
        self.optimizers = [_adamw(kind) for kind in kinds]

    def step(self) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        ids, _, _, labels = _batch()
        with loss_parallel():
            logits = self.net(ids, self.positions)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
        if self.wpe is not None and self.wpe.grad is not None:
            dist.all_reduce(self.wpe.grad)
        for optimizer in self.optimizers:
            optimizer.step()
        found = loss.detach()
        return found.full_tensor() if isinstance(found, DTensor) else found


@torch.no_grad()
def _copy_weights(net: _Net, model: Any) -> None:
    """From transformers' GPT-2, whose matrices are transposed."""
    body = model.transformer
    pairs = [
        (net.wte.weight, body.wte.weight), (net.wpe.weight, body.wpe.weight),
        (net.head.weight, model.lm_head.weight),
    ]  # fmt: skip
    for ours, theirs in zip(net.blocks, body.h, strict=True):
        assert isinstance(ours, _Block)
        weights, biases = theirs.attn.c_attn.weight.t(), theirs.attn.c_attn.bias
        for k, layer in enumerate((ours.attn.q, ours.attn.k, ours.attn.v)):
            mine = slice(k * WIDTH, (k + 1) * WIDTH)
            pairs += [(layer.weight, weights[mine]), (layer.bias, biases[mine])]
        others = (theirs.attn.c_proj, theirs.mlp.c_fc, theirs.mlp.c_proj)
        for linear, other in zip((ours.attn.o, ours.mlp[0], ours.mlp[2]), others, strict=True):
            assert isinstance(linear, nn.Linear)
            pairs += [(linear.weight, other.weight.t()), (linear.bias, other.bias)]
    for p, value in pairs:
        p.copy_(value)


NAMES = ("ours", "ours, sequence", "torch", "torch, sequence", "one rank")


def _speed(world: World, out: Path) -> None:
    contestants: dict[str, Any] = {
        "ours": _Ours(world, False), "ours, sequence": _Ours(world, True),
        "torch": _Torch(False), "torch, sequence": _Torch(True),
    }  # fmt: skip
    contestants["one rank"] = _One() if world.is_main else None
    losses: dict[str, float] = {}

    def turn(name: str) -> None:
        if (contestant := contestants[name]) is not None:
            losses[name] = contestant.step().item()
        dist.barrier()

    seconds = alternate({name: lambda name=name: turn(name) for name in NAMES}, ROUNDS)  # type: ignore[misc]
    if world.is_main:
        agree(losses, 1e-3)  # after all updates
        torch.save(seconds, out)


# The head and its loss


class _AllLogits(torch.autograd.Function):
    """Every rank gets all logits, and needs the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ranks: Communicator) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_gather(logits, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.ranks.shard_of(dy, 1), None


def _fused(hidden: Tensor, weight: Tensor, labels: Tensor, ranks: Communicator) -> Tensor:
    first = ranks.rank * len(weight)
    known = weight[: PUBLISHED - first]
    return head_loss(replicate(hidden, ranks), known, labels, ranks, first)


def _gathered(hidden: Tensor, weight: Tensor, labels: Tensor, ranks: Communicator) -> Tensor:
    logits = _AllLogits.apply(replicate(hidden, ranks) @ weight.t(), ranks)
    return F.cross_entropy(logits[:, :PUBLISHED], labels, reduction="sum")


HEADS_AND_LOSSES: dict[str, Callable[..., Tensor]] = {"fused": _fused, "gathered": _gathered}


def _head(world: World, names: list[str], rounds: int, out: Path) -> None:
    """Seconds of each way, and the peak of memory above that before them."""
    ranks, generator = Communicator(dist.group.WORLD), torch.Generator().manual_seed(world.rank)
    rows = -(-PUBLISHED // world.world_size)
    weight = (torch.randn(rows, WIDTH, generator=generator) / WIDTH**0.5).requires_grad_()
    generator.manual_seed(0)
    hidden = torch.randn(B * T, WIDTH, generator=generator).requires_grad_()
    labels = torch.randint(PUBLISHED, (B * T,), generator=generator)
    found: dict[str, list[Tensor]] = {}

    def turn(name: str) -> None:
        hidden.grad = weight.grad = None
        HEADS_AND_LOSSES[name](hidden, weight, labels, ranks).backward()
        if len(names) > 1 and name not in found:
            assert hidden.grad is not None and weight.grad is not None
            found[name] = [hidden.grad.clone(), weight.grad.clone()]
        dist.barrier()

    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    seconds = alternate({name: lambda name=name: turn(name) for name in names}, rounds)  # type: ignore[misc]
    peak = torch.tensor(float(_resident("VmHWM") - before))
    for a, b in zip(*found.values(), strict=True) if found else ():
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if world.is_main:
        torch.save((seconds, peak.item()), out)


def _resident(what: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[what].split()[0]) * 1024


def run() -> list[Row]:
    """Prints the tables."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"

        def on(ranks: int, function: Callable[..., None], *args: Any) -> Any:
            settings = Options(world_size=ranks, device="cpu", cores_per_rank=1)
            launch(function, settings, *args, out)
            return torch.load(out, weights_only=True)

        seconds = on(2, _speed)
        against = {"ours": ("torch", 1.0), "ours, sequence": ("torch, sequence", 1.0)}
        for name in NAMES:
            value, spread = summarize([1000 * s for s in seconds[name]])
            other, goal = against.get(name, ("one rank", None))
            ratio = ratio_of(seconds[other], seconds[name])
            rows.append(Row(name, value, spread, "ms", ratio, other, goal))
        for name in against:
            value, spread = summarize([1000 * s for s in seconds[name]])
            ratio = ratio_of(seconds["one rank"], seconds[name])
            rows.append(Row(f"{name}, 1 -> 2 ranks", value, spread, "ms", ratio, "one rank", 1.7))
        heads, _ = on(2, _head, list(HEADS_AND_LOSSES), ROUNDS)
        peaks = {name: on(2, _head, [name], 1)[1] for name in HEADS_AND_LOSSES}
        for name in HEADS_AND_LOSSES:
            value, spread = summarize([1000 * s for s in heads[name]])
            fused = name == "fused"
            ratio, goal = ratio_of(heads["gathered"], heads[name]), 1.0 if fused else None
            rows.append(Row(f"head and loss, {name}", value, spread, "ms", ratio, "gathered", goal))
            value, ratio = peaks[name] / MIB, peaks["gathered"] / peaks[name]
            rows.append(
                Row(f"head and loss, {name}, peak", value, (value, value), "MiB", ratio,
                    "gathered", 2.0 if fused else None)
            )  # fmt: skip
    write_rows("tensor", TITLE, rows)
    return rows


if __name__ == "__main__":
    run()
