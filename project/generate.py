"""Translates, or continues texts, with a GPT-2 that was trained here or elsewhere.

Each input line gives one output line, in the same order. A model that was trained on pairs
translates; any other one continues the line. An empty line is translated to an empty line, or
continued as the beginning of a new text.

    python project/generate.py workdir "Der Mann kauft das Ei."
    python project/generate.py workdir < sentences.txt > translations.txt
    python project/generate.py workdir "It was" --temperature 0.8
    python project/generate.py workdir --export gpt2_de_en        a folder for transformers
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from project.command_line import Parser
from training.launch.errors import UserError, say
from training.launch.signals import ENDING_SIGNALS, end_process, set_handlers
from training.options import count, number_type, whole

TEMPERATURE = number_type(
    float, lambda x: x == 0 or 1e-6 <= x < float("inf"), "0, or 1e-6 or more, e.g. 0.8"
)


def folder(name: str) -> str:
    """The model's folder or, if it has the form of one, a name on the hub."""
    path = Path(name)
    if not path.is_dir() and (len(path.parts) != 2 or path.parent.is_dir()):
        raise argparse.ArgumentTypeError(
            f"{name}: there is no such folder; the --workdir of a run works, or a name on the hub "
            "with its owner, e.g. openai-community/gpt2"
        )
    return name


def parse_generate(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program on a mistake."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("trained", type=folder, metavar="FOLDER", help="a workdir, a checkpoint, or a GPT-2's name")
    add("text", nargs="*", default=[], metavar="TEXT",
        help="lines of text; default: those of standard input")  # fmt: skip
    add("--export", type=Path, metavar="NEW",
        help="only write model and tokenizer there, for transformers")  # fmt: skip
    add("--temperature", type=TEMPERATURE, default=0.0, metavar="T",
        help="sample tokens, from logits divided by T; default: 0, the most probable")  # fmt: skip
    add("--seed", type=whole, default=0, help="of the samples; default: 0")
    add("--max_new_tokens", type=count, default=128, metavar="N",
        help="per output line, at most; the model may have less room; default: 128")  # fmt: skip
    add("--batch_size", type=count, default=128, metavar="N", help="lines at a time; default: 128")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: a GPU if there is one; default: auto")  # fmt: skip
    args = parser.parse_intermixed_args(argv)  # text may follow options
    if args.text and args.export:
        parser.error("TEXT and --export: one works at a time; leave out the other")
    return args


if __name__ == "__main__":  # before torch is imported, which takes seconds
    set_handlers(ENDING_SIGNALS, end_process)
    given = parse_generate()
    if not (given.text or given.export) and sys.stdin.isatty():
        say("Lines to translate or continue, each ended by Enter; Ctrl-D ends the last one.\n")


import torch

from project.utils import run_program
from training.files import moving
from training.launch.world import choose_device
from training.tasks.text_files import UTF_8, text_lines
from training.trained import export, load_trained, source_end


def read_lines(args: argparse.Namespace) -> list[str]:
    """The lines to translate or continue. Raises UserError if they are not UTF-8."""
    if args.text:
        return "\n".join(args.text).split("\n")
    try:
        return list(text_lines(sys.stdin.buffer))
    except UnicodeError as error:
        raise UserError(f"standard input: {error}{UTF_8}") from error


def prompts_of(tokenizer: Any, lines: Sequence[str], end: str | None) -> list[list[int]]:
    """The token ids of each line, followed by the token that ends a sentence to translate. Text
    that looks like a special token stays text. Raises UserError if a line is too long."""
    last, room = tokenizer.convert_tokens_to_ids([end] if end else []), tokenizer.model_max_length
    prompts = [
        tokenizer(line, split_special_tokens=True, verbose=False)["input_ids"] + last
        for line in lines
    ]
    for number, ids in enumerate(prompts, 1):
        if len(ids) >= room:
            raise UserError(
                f"line {number} has {len(ids)} tokens, and the model was trained on sequences of "
                f"{room}; {room - 1} tokens or fewer work"
            )
    return [ids or [tokenizer.eos_token_id] for ids in prompts]


def continuations(
    model: Any, tokenizer: Any, lines: Sequence[str], args: argparse.Namespace
) -> list[str]:
    """The translation or continuation of each line. Raises UserError if a line is too long.

    Lines of equal length are continued together, so there is no padding, and each line can fill
    the model's whole length.
    """
    end, size = source_end(tokenizer), args.batch_size
    prompts = prompts_of(tokenizer, lines, end)
    by_length: dict[int, list[int]] = {}  # the numbers of lines
    for i, line in enumerate(lines):
        if line.strip() or not end:  # else there is nothing to translate
            by_length.setdefault(len(prompts[i]), []).append(i)
    options: dict[str, Any] = {"do_sample": args.temperature > 0}
    if args.temperature:  # from all tokens; transformers' default is the 50 most probable ones
        options |= {"temperature": args.temperature, "top_k": 0}
    if unused := list(range(len(tokenizer), model.config.vocab_size)):  # ids without a token
        options["suppress_tokens"] = unused
    torch.manual_seed(args.seed)
    texts = [""] * len(lines)
    batches = [rows[k : k + size] for rows in by_length.values() for k in range(0, len(rows), size)]
    for batch in moving(batches, "Generating", len(batches), "batch"):
        ids = torch.tensor([prompts[i] for i in batch], device=model.device)  # [B, T]
        T = ids.size(1)
        outputs = model.generate(
            ids, attention_mask=torch.ones_like(ids),
            max_length=min(tokenizer.model_max_length, T + args.max_new_tokens), **options,
        )  # [B, T + new tokens]  # fmt: skip
        generated = tokenizer.batch_decode(outputs[:, T:], skip_special_tokens=True)
        for i, text in zip(batch, generated, strict=True):
            texts[i] = re.sub(r"\r?\n", " ", text.strip() if end else lines[i] + text)
    return texts


def main() -> None:
    """The program."""
    args = parse_generate()
    if args.export is not None:
        export(*load_trained(args.trained), args.export)
        print(f"Model and tokenizer, for transformers, are in {args.export}/.")
        return
    lines = read_lines(args)
    device = choose_device(args.device)
    for text in continuations(*load_trained(args.trained, device), lines, args):
        print(text)


if __name__ == "__main__":
    run_program(main)
