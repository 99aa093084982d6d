"""The tables at the end of a session: one a kernel, in Markdown, so that they can be pasted into docs."""

from __future__ import annotations

from race import Row


def table(title: str, rows: list[Row]) -> list[str]:
    """The lines of one kernel's table."""
    names = list(dict.fromkeys(name for row in rows for name in row.times))
    notes = list(dict.fromkeys(name for row in rows for name in row.notes))
    heading = ["case", *(f"{name} ms" for name in names), "ratio", "rate", "of the limit", "differ by", *notes]
    body = [
        [
            row.case,
            *(milliseconds(row.times[name]) if name in row.times else "" for name in names),
            f"{row.ratio:.2f}",
            row.rate,
            "" if row.share is None else f"{row.share:.0%}",
            f"{row.difference:.0e}" if row.difference else "0",
            *(row.notes.get(name, "") for name in notes),
        ]
        for row in rows
    ]
    empty = [i for i in range(len(heading)) if not any(line[i] for line in body)]
    lines = [[text for i, text in enumerate(line) if i not in empty] for line in [heading, *body]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    written = []
    for line in lines:
        case, *numbers = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        written.append(f"| {' | '.join([case.strip().ljust(widths[0]), *numbers])} |")
    rule = f"|{'-' * (widths[0] + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in widths[1:])
    return [title, "", written[0], rule, *written[1:], ""]


def milliseconds(seconds: float) -> str:
    """Three or four significant digits."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 1000 else f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"
