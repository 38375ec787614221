"""Chapter 1: one process trains a small GPT-2. The later chapters compute the same in parallel.

    python tutorial/1_one_process.py

The text is lines "German = English", so predicting the next word means translating. Every chapter's
losses agree with one process to 1e-14. Full versions: training/tasks/gpt2.py, training/loop.py.
"""

import os
import re
from functools import partial
from pathlib import Path

import environment  # isort: skip  # noqa: F401
import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, T, C, H = 8, 32, 64, 4  # rows of a batch, words in a row, width of the model, heads
BLOCKS, STEPS, LEARNING_RATE = 2, int(os.environ.get("STEPS", "64")), 7e-3
CORPUS = Path(__file__).resolve().parents[1] / "training" / "tasks" / "corpus"


def read_text() -> tuple[Tensor, int]:
    """The text as one long row of word numbers, and V, the number of different words."""
    files = [(CORPUS / name).read_text("utf-8").splitlines() for name in ("train.de", "train.en")]
    text = "".join(f"{german} = {english}\n" for german, english in zip(*files, strict=True))
    words = re.findall(r"\w+|[^\w ]", text)  # words, punctuation marks and ends of lines
    number = {word: i for i, word in enumerate(sorted(set(words)))}
    return torch.tensor([number[word] for word in words]), len(number)


def get_batch(text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Inputs (B, T) and targets (B, T), shifted by one word. They depend only on the step."""
    starts = torch.randint(len(text) - T, (B, 1), generator=torch.Generator().manual_seed(step))
    rows = text[starts + torch.arange(T + 1)]  # (B, T + 1)
    return rows[:, :-1], rows[:, 1:]


class Embedding(nn.Module):
    """Word embedding plus position embedding: (B, T) -> (B, T, C)."""

    def __init__(self, V: int) -> None:
        super().__init__()
        self.wte, self.wpe, self.positions = nn.Embedding(V, C), nn.Embedding(T, C), torch.arange(T)
        nn.init.normal_(self.wte.weight, std=C**-0.5)  # the head's, too: logits are about 1
        nn.init.normal_(self.wpe.weight, std=C**-0.5)

    def forward(self, words: Tensor) -> Tensor:
        return self.wte(words) + self.wpe(self.positions)


class Block(nn.Module):
    """Causal attention, then an MLP: (B, T, C) -> (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU("tanh"), nn.Linear(4 * C, C))
        self.attend = partial(F.scaled_dot_product_attention, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.c_attn(self.ln_1(x)).unflatten(-1, (3, -1, C // H)).permute(2, 0, 3, 1, 4)
        a = self.attend(*qkv)  # (B, H, T, C/H), as q, k and v are
        x = x + self.c_proj(a.transpose(1, 2).flatten(2))  # (B, T, C): heads side by side
        return x + self.mlp(self.ln_2(x))


class Head(nn.Module):
    """Logits of the next word: (B, T, C) -> (B, T, V), with the embedding's matrix (tied)."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.ln_f, self.weight = nn.LayerNorm(C), embedding.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.ln_f(x), self.weight)


def build_model(V: int) -> nn.Sequential:
    """The layers in sequence, for later chapters to cut. The seed is the same in all processes."""
    torch.manual_seed(0)
    embedding = Embedding(V)
    return nn.Sequential(embedding, *[Block() for _ in range(BLOCKS)], Head(embedding)).double()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits (B, T, V), targets (B, T) -> (), the mean over words; guessing gives ln V = 7.3."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(build=build_model) -> list[float]:
    """The loss of every step."""
    torch.set_num_threads(1)  # one core per process, as in all chapters
    text, V = read_text()
    model = build(V)
    optimizer, losses = torch.optim.AdamW(model.parameters(), LEARNING_RATE), []
    for step in range(STEPS):
        inputs, targets = get_batch(text, step)
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(build=build_model, **parallel: list[float]) -> None:
    """Trains in one process too, and prints all losses side by side."""
    runs = {"one_process": train(build), **parallel}
    print("step", *(f"{name:>16}" for name in runs))
    for step in range(0, STEPS, 9):
        print(f"{step:4}", *(f"{losses[step]:16.6f}" for losses in runs.values()))
    apart = max(max(row) - min(row) for row in zip(*runs.values(), strict=True))
    print(f"largest difference between the columns, over all steps: {apart:.1e}")


if __name__ == "__main__":
    compare()
