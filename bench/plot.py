"""Bars of the ratios in a file of `pytest bench/ --benchmark-json FILE`: `python bench/plot.py FILE ratios.svg`"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="JSON of --benchmark-json or --benchmark-save")
    parser.add_argument("picture", type=Path, help="what to write; its suffix is the format: .svg, .png, .pdf")
    arguments = parser.parse_args()
    entries = json.loads(arguments.results.read_text())["benchmarks"]
    groups: dict[str, dict[str, float]] = {}
    for entry in entries:
        name = entry["name"].removeprefix("bench_")
        groups.setdefault(entry["group"], {})[name] = entry["extra_info"]["ratio"]
    heights = [len(cases) + 2 for cases in groups.values()]
    figure, axes = pyplot.subplots(
        len(groups), figsize=(9, 0.22 * sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )  # fmt: skip
    for axis, (title, cases) in zip(axes[:, 0], groups.items(), strict=True):
        colors = ["#2a7" if ratio >= 1 else "#c64" for ratio in cases.values()]
        bars = axis.barh(list(cases), cases.values(), color=colors)
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(title, loc="left", fontsize=9)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.tick_params(labelsize=7)
    figure.suptitle("the other's time over ours: above 1, pyfast is faster", fontsize=10)
    figure.savefig(arguments.picture)


if __name__ == "__main__":
    main()
