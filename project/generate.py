"""Translates, or continues texts, with a GPT-2 that was trained here or elsewhere.

Each input line gives one output line, in the same order. A model that was trained on pairs
translates; any other one continues the line. An empty line is translated to an empty line, or
continued as the beginning of a new text.

    python project/generate.py workdir "Der Mann kauft das Ei."
    python project/generate.py workdir --input sentences.txt > translations.txt
    python project/generate.py workdir "It was" --num_samples 3 --temperature 0.8 --top_k 40
    python project/generate.py workdir --export gpt2_de_en        a folder for transformers
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from project.command_line import Parser
from training.launch.errors import UserError, say
from training.options import count, number_type, whole

TEMPERATURE = number_type(float, lambda x: 0 <= x < float("inf"), "0 or more, as 0.8")


def folder(name: str) -> str:
    """The model's folder; or, by its form, a name on the hub."""
    path = Path(name)
    if not path.is_dir() and (len(path.parts) != 2 or path.parent.is_dir()):
        raise argparse.ArgumentTypeError(
            f"{name}: there is no such folder; the --workdir of a run works, or a name on the hub "
            "with its owner, as openai-community/gpt2"
        )
    return name


def opened(name: str) -> BinaryIO:
    """A file of lines, or - for standard input."""
    try:
        return sys.stdin.buffer if name == "-" else Path(name).open("rb")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name}: it cannot be read ({error.strerror})") from None


def parse_generate(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program if it cannot be right."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("trained", type=folder, metavar="FOLDER", help="a workdir, a checkpoint, or a GPT-2's name")
    add("text", nargs="*", metavar="TEXT", help="lines of text; default: those of standard input")
    add("--input", type=opened, metavar="FILE", help="read the lines from it")
    add("--export", type=Path, metavar="NEW",
        help="only write model and tokenizer there, for transformers")  # fmt: skip
    add("--num_samples", type=count, default=1, metavar="N", help="lines out per line in [1]")
    add("--temperature", type=TEMPERATURE, default=0.0, metavar="T",
        help="sample tokens, from logits divided by this [0: take the most probable]")  # fmt: skip
    add("--top_k", type=count, metavar="K", help="sample from the K most probable tokens")
    add("--seed", type=whole, default=0, help="of the samples [0]")
    add("--max_new_tokens", type=count, default=128, metavar="N",
        help="per line out, as far as the model's length allows [128]")  # fmt: skip
    add("--batch_size", type=count, default=128, metavar="N", help="lines at a time [128]")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: a GPU if there is one")  # fmt: skip
    args = parser.parse_intermixed_args(argv)  # text may follow options
    if bool(args.text) + bool(args.input) + bool(args.export) > 1:
        parser.error("of text, --input and --export one works at a time; leave out the others")
    if args.temperature == 0 and (args.num_samples > 1 or args.top_k):
        parser.error("--num_samples and --top_k sample: --temperature 0.8 works with them")
    return args


if __name__ == "__main__":  # before torch is imported, which takes seconds
    given = parse_generate()
    if not (given.text or given.input or given.export) and sys.stdin.isatty():
        say("Lines to translate or continue, each ended by Enter; Ctrl-D ends the last one.\n")


import torch
from tqdm import tqdm

from project.utils import run_program
from training.launch.world import choose_device
from training.trained import export, load_trained, source_end


def read_lines(args: argparse.Namespace) -> list[str]:
    """The lines to translate or continue. A line ends with a line feed alone: other characters that
    Python takes for ends of lines are text. Raises UserError if it is not UTF-8."""
    try:
        given = io.BytesIO("".join(f"{text}\n" for text in args.text).encode())
        stream = given if args.text else args.input or sys.stdin.buffer
        lines = io.TextIOWrapper(stream, "utf-8-sig", newline="\n")
        return [line.removesuffix("\n").removesuffix("\r") for line in lines]
    except (OSError, UnicodeError) as error:
        source = "TEXT" if args.text else f"--input {args.input.name if args.input else '-'}"
        raise UserError(f"{source}: it cannot be read ({error}); text in UTF-8 works") from error


def prompts_of(tokenizer: Any, lines: Sequence[str], end: str | None) -> list[list[int]]:
    """The token ids of each line, with the token that ends a sentence to translate. Text that looks
    like such a token is text. Raises UserError if a line is too long."""
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
) -> list[list[str]]:
    """The translations or continuations of each line. Raises UserError if a line is too long.

    Lines of equal length are continued together: no padding, and each has all of the room.
    """
    end, n, size = source_end(tokenizer), args.num_samples, args.batch_size
    prompts = prompts_of(tokenizer, lines, end)
    by_length: dict[int, list[int]] = {}  # the numbers of lines
    for i, line in enumerate(lines):
        if line.strip() or not end:  # else there is nothing to translate
            by_length.setdefault(len(prompts[i]), []).append(i)
    options: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        options = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k or 0}
    if unused := list(range(len(tokenizer), model.config.vocab_size)):  # rows of no token
        options["suppress_tokens"] = unused
    torch.manual_seed(args.seed)
    texts = [[""] * n for _ in lines]
    batches = [rows[k : k + size] for rows in by_length.values() for k in range(0, len(rows), size)]
    for batch in tqdm(batches, "Generating", leave=False, disable=None):
        ids = torch.tensor([prompts[i] for i in batch], device=model.device)  # [B, T]
        T = ids.size(1)
        outputs = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_return_sequences=n,
            max_length=min(tokenizer.model_max_length, T + args.max_new_tokens), **options,
        )  # [B n, T + new tokens]  # fmt: skip
        generated = tokenizer.batch_decode(outputs[:, T:], skip_special_tokens=True)
        for k, i in enumerate(batch):
            own = generated[k * n : (k + 1) * n]
            found = [text.strip() if end else lines[i] + text for text in own]
            texts[i] = [re.sub(r"\r?\n", " ", text) for text in found]
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
    for texts in continuations(*load_trained(args.trained, device), lines, args):
        print("\n".join(texts), flush=True)


if __name__ == "__main__":
    run_program(main)
