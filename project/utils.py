"""The course's functions: tokenizer, batches, training, evaluation.

They are the loop that a reader follows, and know no strategy: what differs between strategies is
handed to them as functions (how a step's gradients are computed, how they are averaged).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from training.data import Batch, Step, encode, load_tokenizer, to_batch, train_tokenizer
from training.generation import WholeModel, translate
from training.optimization import Optimizers
from training.record import writing

if TYPE_CHECKING:  # see training/model.py
    from transformers import PreTrainedTokenizerFast

# Bars of one process need a lock among its threads. The default is one among processes, a named
# semaphore of the system's, which a run that is killed would leave in /dev/shm.
tqdm.set_lock(threading.RLock())


def get_tokenizer(
    examples: Sequence[dict[str, str]], vocab_size: int, src_key: str, tgt_key: str, workdir: Path
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on `examples`, writes it to workdir/tokenizer.json, and
    returns it as it is read back. One rank calls this; the others `load_tokenizer(workdir)`."""
    tokenizer = train_tokenizer(examples, vocab_size, src_key, tgt_key)
    with writing(workdir / "tokenizer.json"):
        tokenizer.save_pretrained(workdir)
    return load_tokenizer(workdir)


def collate_batch(
    examples: Sequence[dict[str, str]],
    src_key: str,
    tgt_key: str,
    tokenizer: PreTrainedTokenizerFast,
    model_max_length: int,
    device: torch.device | str,
) -> Batch:
    """Tokenises pairs and pads them, the course's way.

    Returns:
        input_ids, labels, label_token_weights, each [B, model_max_length]; weight 1 on target
        tokens alone. (And target_index, see `training.data.to_batch`.)
    """
    encoded = encode(examples, tokenizer, src_key, tgt_key, model_max_length)
    pad_id = tokenizer.convert_tokens_to_ids(tokenizer.pad_token)
    return to_batch(encoded, pad_id, device, model_max_length)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The context in which a forward pass runs under --precision."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def precision_notes(device: torch.device, precision: str) -> list[str]:
    """What a user should know of --precision on this machine: nothing, or one line."""
    if precision == "fp32" or device.type != "cpu":
        return []
    cpu = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if cpu.get("architecture") != "x86_64" or cpu.get("avx512_bf16") or cpu.get("amx_bf16"):
        return []
    return [
        f"--precision {precision}: this CPU has no instructions for it (avx512_bf16 or amx_bf16) "
        "and computes it several times slower than fp32"
    ]


@dataclass(frozen=True)
class EpochTotals:
    """What one rank did in an epoch of training, so far; loss_sum is in nats, seconds of wall
    clock. Loss and target tokens are those of the steps that were not skipped."""

    loss_sum: float = 0.0
    target_tokens: int = 0
    positions: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    steps: int = 0


NOTHING_YET = EpochTotals()


def train(
    model: nn.Module,
    optimizer: Optimizers,
    steps: Iterable[Step],
    backward_fn: Callable[[Step], Tensor],
    desc: str,
    rank: int = 0,
    average_gradients_fn: Callable[[nn.Module], None] | None = None,
    n_steps: int | None = None,
    before: EpochTotals = NOTHING_YET,
    after_step: Callable[[EpochTotals], None] | None = None,
) -> EpochTotals:
    """An epoch, or what is left of it.

    Args:
        backward_fn: computes this rank's gradients of the step's loss, which is the mean over all
            target tokens of the *global* batch, and returns this rank's summed loss.
        average_gradients_fn: called after backward: makes the gradients those of all ranks.
        before: of the steps of this epoch that an earlier run has done; `steps` are the others.
        after_step: called with the totals so far, as to save them; its time is not counted.

    The gradients of the last step are left in place. A step that the optimizer left out is said to
    be.

    Raises:
        RunError: a loss or gradient is not finite; see `Optimizers.step`.
    """
    model.train()
    totals = before
    start = time.perf_counter() - before.seconds
    bar = tqdm(
        steps, desc, n_steps, disable=None if rank == 0 else True, leave=False, initial=before.steps
    )
    for step in bar:
        optimizer.zero_grad()
        loss = backward_fn(step).cpu()
        if average_gradients_fn is not None:
            average_gradients_fn(model)
        left_out = optimizer.step(loss, step.target_tokens)
        if left_out is not None and rank == 0:
            bar.write(left_out)
        mine = sum(len(batch["target_index"]) for batch in step.micro_batches)
        totals = _add(totals, step, loss.item(), mine, left_out is not None, start)
        bar.set_postfix(
            loss=f"{loss.item() / max(1, mine):.3f}",
            tokens_per_sec=f"{totals.positions / totals.seconds:,.0f}",
            refresh=False,
        )
        if after_step is not None:
            paused = time.perf_counter()
            after_step(totals)
            start += time.perf_counter() - paused
    return totals


def _add(
    totals: EpochTotals, step: Step, loss: float, targets: int, skipped: bool, start: float
) -> EpochTotals:
    """The totals with those of one more step."""
    return EpochTotals(
        loss_sum=totals.loss_sum + (0.0 if skipped else loss),
        target_tokens=totals.target_tokens + (0 if skipped else targets),
        positions=totals.positions + step.positions,
        tokens=totals.tokens + step.tokens,
        seconds=time.perf_counter() - start,
        skipped=totals.skipped + skipped,
        steps=totals.steps + 1,
    )


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Sums each value over the ranks of the default group; as they are where there is none."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


@torch.no_grad()
def evaluate_loss(
    model: nn.Module,
    batches: Iterable[Batch],
    loss_fn: Callable[[Batch], Tensor],
    desc: str,
    rank: int = 0,
) -> tuple[float, int]:
    """This rank's summed loss in nats, and its target tokens: the mean over all target tokens is
    a quotient of sums over ranks, and not a mean of the batches' means."""
    model.eval()
    loss_sum, targets = 0.0, 0
    for batch in tqdm(batches, desc, disable=None if rank == 0 else True, leave=False):
        if targets_here := len(batch["target_index"]):
            loss_sum += loss_fn(batch).item()
            targets += targets_here
    return loss_sum, targets


def generate(
    model: Any,
    examples: Sequence[dict[str, str]],
    src_key: str,
    tgt_key: str,
    tokenizer: PreTrainedTokenizerFast,
    model_max_length: int,
    device: torch.device | str,
    desc: str,
    rank: int = 0,
    batch_size: int = 128,
) -> list[str]:
    """The translations of the examples by a whole model; see `training.generation.translate`."""
    model.eval()
    return translate(
        WholeModel(model), [example[src_key] for example in examples], src_key, tgt_key, tokenizer,
        model_max_length, device, batch_size, desc if rank == 0 else None,
    )  # fmt: skip


def evaluate_bleu(
    examples: Sequence[dict[str, str]], gen_sents: Sequence[str], tgt_key: str
) -> dict[str, float]:
    """The corpus BLEU of the translations, by sacrebleu: {"bleu": 0 ... 100}."""
    from sacrebleu.metrics import BLEU

    references = [[example[tgt_key] for example in examples]]
    return {"bleu": BLEU().corpus_score(list(gen_sents), references).score}


def save_grad_weights(model: nn.Module, rank: int) -> Path:
    """Writes the gradients, by parameter name, to tests/model{rank}_gradients.pth."""
    path = Path("tests") / f"model{rank}_gradients.pth"
    path.parent.mkdir(exist_ok=True)
    gradients = {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}
    torch.save(gradients, path)
    return path
