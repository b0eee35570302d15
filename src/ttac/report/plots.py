"""Figures from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ttac.files import replacing
from ttac.report.records import Record


def plot_cumulative_error(panels: Mapping[str, Mapping[str, Record]], path: Path | str) -> None:
    """Draw the error so far over the samples so far: one panel a domain, one line a method."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("figures are drawn by matplotlib: pip install 'ttac[demo]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 2.9 * rows), sharex=True, squeeze=False, layout="constrained"
    )
    names = list(next(iter(panels.values())))
    colours = dict(zip(names, _colours(len(names)), strict=True))
    for axes, (domain, records) in zip(grid.flat, panels.items(), strict=False):
        for name, record in records.items():
            samples, errors = zip(*record.cumulative_error, strict=True)
            emphasis = {"linewidth": 2.2} if name.startswith("TTAC") else {"linewidth": 1.2, "linestyle": "--"}
            axes.plot(samples, errors, label=name, color=colours[name], **emphasis)
        axes.set_title(domain, fontsize=10)
        axes.set_ylim(0, None)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("samples so far", fontsize=10)
    figure.supylabel("error so far (%)", fontsize=10)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    with replacing(path) as draft:
        figure.savefig(draft, format=Path(path).suffix.lstrip(".") or "png", dpi=130)
    plt.close(figure)


def _colours(count: int) -> Sequence[str]:
    # Okabe and Ito's palette, which colour-blind readers tell apart.
    palette = ["#7f7f7f", "#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#D55E00", "#0072B2", "#F0E442"]
    return [palette[index % len(palette)] for index in range(count)]
