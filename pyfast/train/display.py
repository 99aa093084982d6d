"""What a person sees of a run: the start panel, the progress bar or plain lines, the table at the end.

Only rank 0 has one. Plain lines are used where the output is not a terminal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from pyfast.train.metrics import Recent, StepMetrics

_PHRASE_END = re.compile(r"(?<=[,;:]) ")


@dataclass(frozen=True)
class StartInfo:
    """What is known before the first step."""

    model: str  # one line
    parameters: int
    data: str  # one line
    layout: list[str]  # one line a rank
    groups: list[str]  # one line a parameter group of the optimizer
    settings: dict[str, str]
    first_step: int
    steps: int
    log_every: int
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """What the model wrote after a prompt; neither holds characters that a terminal obeys."""

    prompt: str
    written: str


@dataclass(frozen=True)
class EndInfo:
    """What is known after the last step."""

    title: str
    rows: dict[str, str]
    sample: Sample | str | None  # a text instead of a sample says why there is none
    next_commands: list[str]


class _Times(ProgressColumn):
    """`0:12, left 1:30`: how long it has run, how long it will."""

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        return Text(f"{clock(task.elapsed or 0.0)}, left {'-' if left is None else clock(left)}")


class Display:
    """Draws on a rich console; all methods are cheap enough to be called every step."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=False)
        self._progress: Progress | None = None
        self._task = None
        self._start: StartInfo | None = None
        self._seconds = 0.0
        self._recent = Recent()

    def start(self, info: StartInfo) -> None:
        """Draw the start panel and, on a terminal, the progress bar."""
        self._start = info
        self.console.print(
            Panel(_start_table(info, self.console.width), title="pyfast train", title_align="left", expand=False)
        )
        for notice in info.notices:
            self.console.print(notice, style="yellow", markup=False, soft_wrap=True)
        if self.console.is_terminal:
            self._progress = Progress(
                BarColumn(bar_width=24 if self.console.width >= 100 else 10),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TextColumn("lr {task.fields[rate]}"),
                TextColumn("{task.fields[speed]} tok/s"),
                _Times(),
                console=self.console,
                refresh_per_second=4,
                speed_estimate_period=30,
            )
            self._task = self._progress.add_task(
                "train", total=info.steps, completed=info.first_step - 1, loss="-", rate="-", speed="-"
            )
            self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        """Show a step: on the bar, and as a line every `log_every` steps.

        The bar's loss and speed and the lines' speed are means over the last steps; a line's loss is its step's own.
        """
        self._seconds += metrics.seconds
        self._recent.add(metrics)
        speed = f"{self._recent.tokens_per_second:,.0f}"
        if self._progress is not None:
            self._progress.update(
                self._task,
                completed=metrics.step,
                loss=f"{self._recent.loss:.3f}",
                rate=f"{metrics.learning_rate:.1e}",
                speed=speed,
            )
        info = self._start
        if metrics.step in (info.first_step, info.steps) or metrics.step % info.log_every == 0:
            done = metrics.step - info.first_step + 1
            left = self._seconds / done * (info.steps - metrics.step)
            self.console.print(
                f"step {metrics.step:>{len(str(info.steps))}}/{info.steps}  loss {metrics.loss:.4f}  "
                f"grad norm {metrics.grad_norm:.3g}  lr {metrics.learning_rate:.2e}  "
                f"{speed} tokens/s  left {clock(left)}"
                + (f"  skipped: overflow at loss scale {metrics.loss_scale:g}" if metrics.skipped else ""),
                markup=False,
                soft_wrap=True,
            )

    def notice(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, style="yellow", markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar down, also when the run failed."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def end(self, info: EndInfo) -> None:
        """Draw what was done, a sample of text, and what to do next."""
        self.close()
        table = Table.grid(padding=(0, 2))
        for name, value in info.rows.items():
            table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
        self.console.print(Panel(table, title=info.title, title_align="left", expand=False))
        if isinstance(info.sample, Sample):
            text = Text.assemble((f"[{info.sample.prompt}]", "dim"), info.sample.written)
            title = Text("a sample of what it writes after [the start of the data]")
            self.console.print(Panel(text, title=title, title_align="left", expand=False))
        elif info.sample is not None:
            self.console.print(info.sample, markup=False, soft_wrap=True)
        if info.next_commands:
            self.console.print("Next:")
            for command in info.next_commands:
                self.console.print(f"  {command}", markup=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    whole = int(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def _start_table(info: StartInfo, width: int) -> Table:
    """Labels and what stands beside them, broken between phrases only; `width` is that of the console."""
    rows = {
        "model": [f"{info.model}, {info.parameters:,} parameters"],
        "data": [info.data],
        "layout": info.layout,
        "optimizer": info.groups,
    }
    filled = {name: [_PHRASE_END.split(line) for line in lines] for name, lines in rows.items()}
    for name, value in info.settings.items():
        section, key = name.split(".", 1)
        filled.setdefault(section + ".", [[]])[0].append(f"{key}={value}")
    room = max(width - max(map(len, filled)) - 6, 20)  # less the label, the gap after it, the frame and its padding
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, lines in filled.items():
        text = "\n".join(fill(phrases, room, "  " if name.endswith(".") else " ") for phrases in lines)
        table.add_row(Text(name, style="bold"), Text(text, overflow="fold"))
    return table


def fill(phrases: list[str], width: int, gap: str) -> str:
    """The phrases in lines of at most `width`, joined by `gap`; a longer phrase has a line of its own."""
    lines: list[str] = []
    for phrase in phrases:
        if lines and len(lines[-1]) + len(gap) + len(phrase) <= width:
            lines[-1] += gap + phrase
        else:
            lines.append(phrase)
    return "\n".join(lines)
