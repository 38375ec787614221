"""What a person sees on a terminal: a line that moves, and in the end nothing of it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.project.programs import ROOT, TINY
from tests.warm import Terminal

LEFT = r"(\d\d:\d\d|\?) left"
LINES = (
    r"Epoch 1 \|.*\| step [1-9]\d* of 100, loss \d\.\d\d\d, [\d,]+ tokens/s, " + LEFT,
    r"Validating \|.*\| batch \d of 1, " + LEFT,
    r"Translating \|.*\| token \d+ of \d+, " + LEFT,
)


def test_a_line_moves_and_ctrl_c_leaves_nothing_of_it(tmp_path: Path) -> None:
    """Of ranks, which are processes of their own; on a terminal of unknown width."""
    program = ROOT / "project" / "run_data_parallel.py"
    more = "--n_epochs 999 --n_train 200 --batch_size 2"
    terminal = Terminal([str(program), *TINY.split(), *more.split()], tmp_path)
    terminal.until("Epoch 2 .*step [1-9]")
    terminal.type("\x03")
    terminal.until(None)
    assert terminal.process.exitcode == 128 + signal.SIGINT
    for line in LINES:
        assert re.search(line, terminal.text), line
    *rows, last, end = terminal.screen()
    assert last == "Interrupted; --resume continues from 000001-epoch0-step100." and end == ""
    assert [row.split()[0] for row in rows if row][-3:] == ["epoch", "start", "1"]
    assert [row for row in rows if "left" in row or "|" in row] == []
