"""Exports trained weights to a folder that `transformers` loads.

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

`generate` stops at the model's end token, and README.md there describes the training. Parameters
have the names of `transformers`, so nothing is converted. They reach rank 0 one at a time: it holds
one file's worth, however large the model is. The folder appears whole, like a checkpoint, and
replaces an earlier export.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from training.checkpoint import SaveError, aside_of, put_in_place
from training.errors import UserError
from training.world import World

FILE_BYTES = 1 << 30  # of weights per file, unless a single tensor is larger


def check_export(folder: Path, workdir: Path) -> None:
    """Raises UserError if an export would replace the run's own `workdir`, or anything else but an
    earlier export."""
    if workdir.resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"--export {folder}: it would replace --workdir {workdir}; --export "
            f"{workdir / 'exported'} works"
        )
    if not folder.exists():
        return
    paths = list(folder.iterdir()) if folder.is_dir() else [folder]
    weights = any(path.suffix == ".safetensors" for path in paths)
    earlier = weights and (folder / "config.json").is_file() and all(p.is_file() for p in paths)
    if paths and not earlier:
        raise UserError(
            f"--export {folder}: something else is there; name a new folder, as --export "
            f"{folder}_gpt2"
        )


def export(
    world: World,
    folder: Path,
    weights: Iterator[tuple[str, Tensor]],
    write_rest: Callable[[Path], None],
) -> None:
    """Writes a model. All ranks call it together.

    Args:
        weights: see `LaidOutModel.weights`.
        write_rest: writes all other files, such as config.json, into the folder it is given.

    Raises:
        SaveError: on rank 0, if it cannot be written. An earlier export stays.
    """
    if not world.is_main:
        deque(weights, maxlen=0)  # joins and sends what this rank has, in rank 0's order
        return
    folder = folder.resolve()
    aside = aside_of(folder)
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed
    try:
        aside.mkdir()
        write_rest(aside)
        _write_weights(aside, weights)
        for path in aside.iterdir():  # safetensors lets only the owner read
            path.chmod((aside / "config.json").stat().st_mode)
        put_in_place(aside, folder)  # renames it: all files, or none
    except (OSError, SafetensorError) as error:
        raise SaveError(f"--export {folder}: cannot be written ({error})") from error
    finally:
        deque(weights, maxlen=0)  # after an error, receives what other ranks still send
        shutil.rmtree(aside, ignore_errors=True)


def write_gpt2(folder: Path, model: Any, tokenizer: Any, max_length: int) -> None:
    """Writes everything but the weights, including the end token for `generate` and the maximum
    length for the tokenizer."""
    from transformers import GenerationConfig

    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.config.update({"architectures": [type(model).__name__], "use_cache": True, **special})
    model.config.save_pretrained(folder)
    GenerationConfig(max_length=max_length, **special).save_pretrained(folder)
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(folder)


def model_card(
    folder: Path, title: str, about: str, prompt: str, summary: Mapping[str, Any], score: str
) -> str:
    """The model card of an export: its README.md, in the hub's format.

    Args:
        folder: named in the example.
        about: what the model was trained on, in lines.
        prompt: of the example.
        summary: `Results.summary`.
        score: the name of the score in `summary`.
    """
    steps = len(summary["loss"])
    lines = "\n".join(f"- {line}" for line in about.splitlines())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---

# {title}

{lines}
- {steps} step{"s" * (steps != 1)}, seed {summary["seed"]}
- validation loss {summary["validation_loss"]:.3f} nats per token, {score} {summary[score]:.1f}

Trained with

```sh
{shlex.join(["python", *sys.argv])}
```

Use it with

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = AutoModelForCausalLM.from_pretrained("{folder}")
ids = tokenizer("{prompt}", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids)[0, ids.input_ids.size(1) :], skip_special_tokens=True))
```
"""


def _write_weights(folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Writes model.safetensors or, if that would be too large, several files with an index."""
    where: dict[str, str] = {}  # the file of each
    batch: dict[str, Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(where.values())) + 1:05d}.safetensors"
        save_file(batch, folder / file, {"format": "pt"})
        where.update(dict.fromkeys(batch, file))
        batch.clear()  # frees the weights: rank 0 holds one file's worth

    total = 0
    for name, p in weights:
        if batch and sum(t.nbytes for t in batch.values()) + p.nbytes > FILE_BYTES:
            flush()
        batch[name] = p.contiguous()
        total += p.nbytes
    flush()
    if len(set(where.values())) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
