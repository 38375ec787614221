"""Loads a trained GPT-2 into one process, from any output of a run.

a workdir       its newest intact checkpoint
a checkpoint    one of the folders in checkpoints/ of a workdir
an export       a folder that generate.py wrote, or any GPT-2 of `transformers`, also on the hub
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runtime.float64 import device_of_float64
from runtime.meta import materialize, names_of
from training.checkpoint import MANIFEST, Checkpoint, names, newest, open_checkpoint
from training.files import CHECKPOINTS, OPTIONS
from training.weights import weights_of

from .launch.errors import UserError
from .tasks.cache import Cache
from .tasks.generation import greedy
from .tasks.gpt2 import gpt2_layers, newest_tokens
from .tasks.pretrained import check_pretrained, first_sentence
from .tasks.sampling import sample
from .tasks.tokens import TOKENIZER_FILES, load_tokenizer

if TYPE_CHECKING:  # see training/tasks/gpt2.py
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Trained:
    """A model and its tokenizer.

    Attributes:
        max_length: of the sequences that it was trained on, in tokens.
        workdir: of the run that trained it; None if another tool did.
    """

    model: Any
    tokenizer: PreTrainedTokenizerFast
    max_length: int
    workdir: Path | None = None

    @property
    def source_end(self) -> str | None:
        """The token after which a translation begins; None: the model continues texts."""
        tokenizer = self.tokenizer
        ends = [t for t in tokenizer.all_special_tokens if re.fullmatch(r"<eos_.+>", t)]
        return next((t for t in ends if t != tokenizer.eos_token), None)


class SamplingDecoder:
    """A model in this process that continues sentences; see `training.tasks.generation.Decoder`.

    Args:
        chances: of all prompts, see `training.tasks.sampling.chances_of`; None takes the most
            probable tokens.
        temperature, top_k: see `training.tasks.sampling.sample`.
    """

    def __init__(
        self, model: Any, chances: Tensor | None, temperature: float, top_k: int | None
    ) -> None:
        self.layers = nn.Sequential(*gpt2_layers(model)).eval()
        self.chances, self.temperature, self.top_k = chances, temperature, top_k

    def next_tokens(self, ids: Tensor, cache: Cache, num_tokens: int) -> Tensor:
        """The next token of each sentence."""
        logits = self.layers(newest_tokens(ids, cache))  # [B, V]
        if self.chances is None:
            return greedy(logits, num_tokens)
        chances = self.chances[cache.prompts, cache.new]  # [B]
        return sample(logits, num_tokens, chances, self.temperature, self.top_k)

    def end(self, turn: Callable[[], None]) -> None:
        """Waits for nobody."""


def load_trained(name: str, device: torch.device | str = "cpu") -> Trained:
    """See the head of this file.

    Raises:
        UserError: there is no such thing, or it is damaged.
    """
    folder = Path(name)
    checkpoints = folder if names(folder) else folder / CHECKPOINTS
    if (folder / MANIFEST).is_file():
        found = _of_checkpoint(open_checkpoint(folder))
    elif checkpoints.is_dir() or (folder / OPTIONS).is_file():
        checkpoint, refused = newest(checkpoints)
        if checkpoint is None:
            why = "this run has no checkpoint yet"
            if refused:
                why = f"every checkpoint of this run is damaged ({'; '.join(refused)})"
            raise UserError(f"{name}: {why}; there is one after every epoch, or --save_every steps")
        found = _of_checkpoint(checkpoint)
    else:
        found = _of_transformers(name)
    device = torch.device(device)
    if found.model.dtype == torch.float64 and device_of_float64(device) != device:
        found.model.float()  # rounded: the device has no float64
    found.model.to(device).eval().requires_grad_(False)
    return found


def _of_checkpoint(checkpoint: Checkpoint) -> Trained:
    from transformers import GPT2Config, GPT2LMHeadModel

    if not (checkpoint.folder / TOKENIZER_FILES[0]).is_file():
        raise UserError(f"{checkpoint.folder}: it is of a model of pictures, and not of text")
    config = GPT2Config.from_dict(json.loads(checkpoint.read("config.json")))
    with torch.device("meta"):
        model: Any = GPT2LMHeadModel(config)
    weights = weights_of(checkpoint)
    model.to(weights["transformer.wte.weight"].dtype)
    materialize(
        model, names_of(model), torch.device("cpu"), lambda name, p: p.data.copy_(weights[name])
    )
    tokenizer = load_tokenizer({file: checkpoint.read(file) for file in TOKENIZER_FILES})
    length = checkpoint.state["options"]["model_max_length"]
    return Trained(model, tokenizer, length, checkpoint.folder.parent.parent)


def _of_transformers(name: str) -> Trained:
    """Raises UserError if it is not a GPT-2 with a tokenizer."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    try:
        check_pretrained(name, max_length=1)
        model = GPT2LMHeadModel.from_pretrained(name)
        gpt2_layers(model)  # refuses variants of GPT-2 that it does not compute
    except (UserError, ValueError) as error:
        why = str(error).removeprefix(f"--model {name}: ")
        if error.__cause__:  # what `transformers` says
            why = first_sentence(error.__cause__)
        raise UserError(
            f"{name}: neither the workdir of a run, nor a checkpoint, nor a GPT-2 of transformers "
            f"({why}); the --workdir of a run works"
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(name)
    return Trained(model, tokenizer, min(tokenizer.model_max_length, model.config.n_positions))
