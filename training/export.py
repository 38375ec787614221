"""Writes a trained GPT-2 as a folder that `transformers` loads, with a model card.

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

`generate` stops at the model's end token. Parameters have the names of `transformers`, so nothing
is converted. What the card says comes from the files in the run's workdir.
"""

from __future__ import annotations

import json
from pathlib import Path

from training.files import OPTIONS, writing
from training.results import commands_of, read_metrics
from training.trained import Trained

from .launch.errors import UserError

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---

# GPT-2

{facts}

Use it with

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = AutoModelForCausalLM.from_pretrained("{folder}")
ids = tokenizer("{prompt}", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids)[0, ids.input_ids.size(1) :], skip_special_tokens=True))
```
"""


SCORES = ("validation_loss", "bleu", "perplexity")  # by an evaluation


def export(trained: Trained, folder: Path) -> None:
    """Writes model, tokenizer and model card into a new folder.

    Raises:
        UserError: something is in the folder.
        RunError: it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--export {folder}: something is there; name a new folder")
    model, tokenizer = trained.model.float(), trained.tokenizer
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.config.update({"use_cache": True, **special})
    model.generation_config.update(max_length=trained.max_length, **special)
    tokenizer.model_max_length = trained.max_length
    with writing(f"--export {folder}"):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(_card(trained, folder), encoding="utf-8")


def _card(trained: Trained, folder: Path) -> str:
    """The model card: the README.md of the hub's format."""
    config, workdir = trained.model.config, trained.workdir
    millions = sum(p.numel() for p in trained.model.parameters()) / 1e6
    facts = [
        f"{config.n_layer} blocks of width {config.n_embd}, vocabulary {config.vocab_size:,}, "
        f"{millions:.1f} M parameters"
    ]
    if workdir is not None and (workdir / OPTIONS).is_file():
        options = json.loads((workdir / OPTIONS).read_text("utf-8"))
        facts.append(
            f"trained on {options['dataset']} in batches of {options['batch_size']}, "
            f"seed {options['seed']}, with "
            + ", resumed with ".join(f"`{command}`" for command in commands_of(workdir))
        )
        evaluations = [x for x in read_metrics(workdir) if "loss" not in x]
        for last in evaluations[-1:]:
            measured = [f"{key} {last[key]:.3f}" for key in SCORES if last.get(key) is not None]
            facts.append(f"after {last['step']} steps: {', '.join(measured)}")
    prompt = "Der Mann kauft das Ei." + trained.source_end if trained.source_end else "The"
    lines = "\n".join(f"- {fact}" for fact in facts)
    return CARD.format(facts=lines, folder=folder, prompt=prompt)
