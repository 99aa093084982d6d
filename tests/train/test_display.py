"""What a person sees of a run, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from pyfast.train.display import Display, StartInfo, fill
from pyfast.train.metrics import Recent, StepMetrics

START = StartInfo("a model", 1000, "some text", ["1 rank"], ["sgd"], {}, first_step=1, steps=100, log_every=10)


def metrics(step: int, loss: float, seconds: float = 1.0) -> StepMetrics:
    return StepMetrics(step, loss, 1.5, 1e-3, 100, 100 / seconds, seconds, 2**20)


def screen(terminal: bool, width: int = 150) -> tuple[Display, io.StringIO]:
    file = io.StringIO()
    return Display(Console(file=file, force_terminal=terminal, width=width, highlight=False, color_system=None)), file


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_the_means_are_over_a_quarter_of_the_steps_and_at_most_fifty():
    recent = Recent()
    for step in range(1, 401):
        recent.add(metrics(step, float(step), seconds=float(step)))
        if step == 3:
            assert (recent.steps, recent.loss) == (1, 3.0)
        if step == 40:
            assert (recent.steps, recent.loss) == (10, 35.5)
    assert (recent.steps, recent.loss) == (50, 375.5)
    assert recent.tokens_per_second == pytest.approx(100 / 375.5)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_history_stays_on_the_screen(terminal):
    display, file = screen(terminal)
    display.start(START)
    for step in range(1, 101):
        display.step(metrics(step, 5.0 - step / 50))
    display.close()
    lines = [line for line in plain(file.getvalue()).splitlines() if "grad norm" in line]
    assert [int(re.search(r"step +(\d+)/100", line)[1]) for line in lines] == [1, *range(10, 101, 10)]
    assert "loss 3.0000  grad norm 1.5" in lines[-1]  # of this very step


@pytest.mark.parametrize("width", [80, 150])
def test_the_bar_shows_means_and_says_which_time_is_which(width):
    display, file = screen(terminal=True, width=width)
    display.start(START)
    for step in range(1, 101):
        display.step(metrics(step, 4.0 if step % 2 else 2.0, seconds=2.0 if step % 2 else 0.5))
    display.close()
    bar = [
        line
        for line in plain(file.getvalue()).splitlines()
        if "100/100" in line and "loss" in line and "step" not in line
    ][-1]
    assert re.search(r"loss 2\.960 lr \S+ 82 tok/s \d+:\d\d, left 0:00", bar), bar


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_start_panel_breaks_no_phrase(width):
    settings = {f"optimizer.some_key_{index}": f"[{index}, b]" for index in range(9)}
    layout = ["rank 0: heads 0-2, kv heads 0, ffn 0-255, vocabulary 0-128, 4 of 8 sequences a step"]
    display, file = screen(terminal=False, width=width)
    display.start(StartInfo("4 layers, width 192", 1000, "12 tokens; read 3 times", layout, ["sgd"], settings, 1, 5, 1))
    said = file.getvalue()
    for phrase in (*[f"some_key_{index}=[{index}, b]" for index in range(9)], "vocabulary 0-128,", "1,000 parameters"):
        assert phrase in said
    assert max(map(len, said.splitlines())) <= width


def test_lines_are_filled():
    assert fill(["aa", "bb", "cccccc", "d"], 5, " ") == "aa bb\ncccccc\nd"
    assert fill([], 5, " ") == ""
