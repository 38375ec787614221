"""`python -m tests.equivalence`: what a person sees of it."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.pipe import Pipe
from tests.equivalence import __main__ as verify
from tests.equivalence.table import TABLE
from training.launch.errors import UserError

GREEN, BROKEN, RAISES = "single-odd", "threads2-1f1b-m3", "threads2-1f1b-m1"


def said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, list[str]]:
    """The status of the program, and its lines under the table's header, less the seconds."""
    status: object = 0
    try:
        verify.main([*argv, "--steps", "2"])
    except SystemExit as end:
        status = end.code
    lines = capsys.readouterr().out.split(f"{verify.HEADER}\n")[1].split("\n")
    return status, [line.split(", in ")[0] for line in lines if line]


def test_what_differs_or_raises_makes_the_status_1_and_says_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the ones after it are trained."""
    train_step = Pipe.train_step

    def fail(pipe: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if len(x) == 1:
            raise ArithmeticError("on purpose")
        found = train_step(pipe, x, *args, **kwargs)
        next(p for p in pipe.parameters() if p.grad is not None).grad[0] += 1
        return found

    monkeypatch.setattr(Pipe, "train_step", fail)
    status, (*lines, last) = said(["--strategy", f"{RAISES},{BROKEN},{GREEN}"], capsys)
    assert (status, last) == (1, "1 of 3 strategies agree")
    green, raised, error, differs, where = lines
    assert (raised.split()[0], raised.split()[-1]) == (RAISES, "FAILED")
    assert error.startswith("    ArithmeticError: on purpose")
    assert (differs.split()[0], differs.split()[-1]) == (BROKEN, "FAILED")
    assert where.startswith("    gradient of transformer.wte.weight, step ")
    assert ": off by " in where and where.endswith(" (at most 1e-10)")
    assert (green.split()[0], green.split()[-1]) == (GREEN, "equal")
    assert said(["--strategy", GREEN], capsys)[0] == 0


def test_the_list_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    verify.main(["--list", "--strategy", "module*"])
    names = capsys.readouterr().out.split()
    assert names == [row.name for row in TABLE if row.name.startswith("module")] != []
    with pytest.raises(UserError, match=r"--strategy dp2-\*: no row"):
        verify.parse_verify(["--strategy", "dp2-*"])
    with pytest.raises(SystemExit):
        verify.parse_verify(["--steps", "1"])
    assert "--steps 1: it must be a whole number, 2 or more" in capsys.readouterr().err
