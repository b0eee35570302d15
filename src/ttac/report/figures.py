"""Figures from tables and points: bars, a heat map, error against time, and features in the plane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from ttac.report.plots import FAINT, INK, PALETTE, PAPER, colours, cumulative_error, legend_above, look, new_figure
from ttac.report.published import MEAN, NO_PROTOCOL
from ttac.report.results import Done
from ttac.report.tables import UNITS, Row, Table, readable, whole_runs

_MARKERS = "osD^vPX*"


def draw(kind: str, table: Table) -> Any | None:
    """Draw a figure of an experiment, None where it has no records for it."""
    if not table.rows:
        return None
    with look():
        return _DRAWN[kind](table)


def bars(table: Table) -> Any:
    """Draw a bar for each number: a panel a protocol, what is not adapted beside each."""
    groups = [group for group in table.groups if group != NO_PROTOCOL] or table.groups
    figure, grid = new_figure(len(groups), 1, 9.5, 2.1 * len(groups) + 0.9, sharex=True)
    colour = colours(row.title for row in table.rows)
    handles = {}
    for axes, group in zip(grid.flat, groups, strict=True):
        rows = _with_reference(table, group)
        width = 0.86 / len(rows)
        for index, row in enumerate(rows):
            places = [place for place, column in enumerate(table.columns) if column in row.cells]
            places = [place for place in places if row.cells[table.columns[place]].whole]
            if not places:
                continue
            cells = [row.cells[table.columns[place]] for place in places]
            left = [place - 0.43 + (index + 0.5) * width for place in places]
            handles[row.title] = axes.bar(left, [cell.mean for cell in cells], width * 0.94, color=colour[row.title])
            spread = [(x, cell) for x, cell in zip(left, cells, strict=True) if cell.std is not None]
            axes.errorbar(
                [x for x, _ in spread], [cell.mean for _, cell in spread], [cell.std for _, cell in spread],
                fmt="none", ecolor=INK, elinewidth=0.8,
            )  # fmt: skip
        axes.set_ylabel(UNITS[table.experiment.metric])
        axes.set_title("" if group == NO_PROTOCOL else group, loc="left", fontsize=9.5)
        axes.grid(axis="y", color=FAINT)
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(-0.5, len(table.columns) - 0.5)
    labels = [readable(column) for column in table.columns]
    long = max(map(len, labels)) * len(labels) > 90
    slant: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if long else {}
    grid.flat[-1].set_xticks(range(len(labels)), labels, **slant)
    legend_above(figure, {row.title: handles[row.title] for row in table.rows if row.title in handles})
    return figure


def _with_reference(table: Table, group: str) -> list[Row]:
    own = table.of(group)
    titles = {row.title for row in own}
    sources = {done.run.source for row in own for done in _runs(row)}
    without = [row for row in table.of(NO_PROTOCOL) if row.title not in titles] if group != NO_PROTOCOL else []
    return [*(row for row in without if {done.run.source for done in _runs(row)} & sources), *own]


def _runs(row: Row) -> list[Done]:
    return list({done.run.name: done for cell in row.cells.values() for done in cell.done}.values())


def heatmap(table: Table) -> Any:
    """Draw the table as coloured squares, the paper's beside it where it has all of them."""
    columns = [column for column in table.columns if column != MEAN]
    measured = _matrix(table.rows, columns, lambda cell: cell.mean if cell.whole else None)
    panels = {"measured": measured}
    published = _matrix(table.rows, columns, lambda cell: cell.published)
    if np.isfinite(published).any():
        panels["in the paper"] = published
    width = max(4.2, len(panels) * (0.9 + 0.58 * len(columns)) + 0.07 * max(len(row.title) for row in table.rows))
    figure, grid = new_figure(1, len(panels), width, 1.2 + 0.42 * len(table.rows), sharey=True)
    below, across = _ticks(columns), _ticks([row.title for row in table.rows])
    for axes, (title, values) in zip(grid.flat, panels.items(), strict=True):
        shades = axes.pcolormesh(np.ma.masked_invalid(values), cmap="cividis_r", edgecolor=PAPER, linewidth=1.5)
        for (y, x), value in np.ndenumerate(values):
            if np.isfinite(value):
                light = fmean(shades.cmap(shades.norm(value))[:3]) > 0.5
                axes.text(
                    x + 0.5, y + 0.5, f"{value:.{table.digits}f}", ha="center", va="center", fontsize=8,
                    color="#111112" if light else "#fefefe",
                )  # fmt: skip
        axes.set_title(f"{UNITS[table.experiment.metric]}, {title}", fontsize=9.5)
        axes.set_xticks(np.arange(len(columns)) + 0.5, below[1])
        axes.set_xlabel(below[0])
        axes.set_yticks(np.arange(len(table.rows)) + 0.5, across[1])
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
    grid.flat[0].set_ylabel(across[0])
    grid.flat[0].invert_yaxis()
    return figure


def _matrix(rows: Sequence[Row], columns: Sequence[str], value: Callable[[Any], float | None]) -> Any:
    found = [[value(row.cells[column]) if column in row.cells else None for column in columns] for row in rows]
    return np.array(found, dtype=float)  # None becomes NaN


def _ticks(labels: Sequence[str]) -> tuple[str, list[str]]:
    """Split what all labels begin with off them.

    >>> _ticks(["tau 0.5", "tau 0.9"])
    ('tau', ['0.5', '0.9'])
    """
    prefix = labels[0].rpartition(" ")[0]
    if not all(label.startswith(f"{prefix} ") for label in labels):
        return "", list(labels)
    return prefix, [label[len(prefix) :].strip() for label in labels]


def error_against_time(table: Table) -> Any | None:
    """Draw error over seconds a sample; a table of times has a point for each number, others one for each row."""
    figure, ((axes,),) = new_figure(1, 1, 8.6, 5.0)
    colour = colours(row.title for row in table.rows)
    each = table.experiment.metric == "seconds"
    markers: dict[str, str] = {}
    labelled: list[tuple[str, tuple[float, float]]] = []
    everywhere: list[tuple[float, float]] = []
    for row in table.rows:
        points = _times_and_errors(table, row, each)
        if not points:
            continue
        if each:
            axes.plot(*zip(*points.values(), strict=True), color=colour[row.title], linewidth=1, alpha=0.6)
        for name, point in points.items():
            markers.setdefault(name, _MARKERS[len(markers) % len(_MARKERS)])
            axes.scatter(*point, color=colour[row.title], marker=markers[name], s=42, zorder=3)
        everywhere += points.values()
        labelled.append((row.title, everywhere[-1]))
    if not everywhere:
        return None
    axes.margins(0.14, 0.12)
    _scale_of_times(axes, [time for time, _ in everywhere])
    axes.set_ylabel("error (%)")
    axes.grid(color=FAINT, which="both", linewidth=0.6)
    if len(markers) > 1:
        made = {name: axes.scatter([], [], color=INK, marker=mark, s=36) for name, mark in markers.items()}
        legend_above(figure, made)
    _label(figure, axes, labelled, everywhere)
    return figure


def _times_and_errors(table: Table, row: Row, each: bool) -> dict[str, tuple[float, float]]:
    """Give the points of a row, by column or by protocol; means over a part of the domains are left out."""
    shown: dict[str, Sequence[Done]]
    if each:
        shown = {column: cell.done for column, cell in row.cells.items() if column != MEAN and cell.whole}
    else:
        shown = {"no adaptation" if row.group == NO_PROTOCOL else row.group: whole_runs(table, row, True)}
    return {name: _time_and_error(done) for name, done in shown.items() if done}


def _scale_of_times(axes: Any, times: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    axes.set_xlabel("seconds a sample (log scale)")
    steps = (1, 2, 5) if max(times) > 3 * min(times) else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    axes.xaxis.set_major_locator(LogLocator(10, steps))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")


def _time_and_error(done: Sequence[Done]) -> tuple[float, float]:
    seconds = fmean(each.record.seconds / each.record.samples for each in done)
    return max(seconds, 1e-9), fmean(each.record.error or 0.0 for each in done)


def _label(
    figure: Any, axes: Any, points: Sequence[tuple[str, tuple[float, float]]], everywhere: Sequence[tuple[float, float]]
) -> None:
    """Write names beside points, each at the first of several places where it covers nothing that is there."""
    figure.canvas.draw()  # settles where points are on the paper
    unit = figure.dpi / 72
    spots = axes.transData.transform([point for _, point in points])
    half = 3.5 * unit
    taken = [(x - half, y - half, x + half, y + half) for x, y in axes.transData.transform(everywhere)]
    places = [(side, dy) for dy in (0, 9, -9, 18, -18, 27, -27, 36, -36, 45, -45, 54, -54) for side in (1, -1)]
    for (name, point), (x, y) in zip(points, spots, strict=True):
        wide, high = 5.0 * unit * len(name), 9 * unit
        for side, dy in places:
            left = x + 7 * unit if side > 0 else x - 7 * unit - wide
            box = (left, y + (dy - 4.5) * unit, left + wide, y + (dy - 4.5) * unit + high)
            if not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        thread = {"arrowstyle": "-", "color": INK, "linewidth": 0.5, "alpha": 0.5} if dy else None
        axes.annotate(
            name, point, (7 * side, dy), textcoords="offset points", va="center", fontsize=8.5,
            ha="left" if side > 0 else "right", arrowprops=thread,
        )  # fmt: skip


Box = tuple[float, float, float, float]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def features(table: Table) -> Any | None:
    """Draw the features that t-SNE laid out, coloured by true class: a panel a method."""
    kept = [done for done in table.experiment.done if done.points is not None]
    kept = [done for done in kept if (done.run.part, done.run.seed) == (kept[0].run.part, kept[0].run.seed)]
    if not kept:
        return None
    columns = min(3, len(kept))
    rows = -(-len(kept) // columns)
    figure, grid = new_figure(rows, columns, 3.1 * columns, 3.1 * rows + 0.5)
    shown: dict[int, Any] = {}
    for axes, done in zip(grid.flat, kept, strict=False):
        points, labels = np.array(done.points.points), np.array(done.points.labels)  # type: ignore[union-attr]
        for label in np.unique(labels).tolist():
            chosen = points[labels == label]
            # As pixels: thousands of circles would weigh megabytes on a page.
            drawn = axes.scatter(*chosen.T, s=5, linewidths=0, color=PALETTE[label % len(PALETTE)], rasterized=True)
            shown.setdefault(label, drawn)
        protocol = "" if done.run.group == NO_PROTOCOL else f" ({done.run.group})"
        axes.set_title(f"{done.run.row}{protocol}\n{done.record.error:.2f} % error", fontsize=9.5)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[["left", "bottom"]].set_visible(False)
    for axes in list(grid.flat)[len(kept) :]:
        axes.set_visible(False)
    if len(shown) <= len(PALETTE):
        names = table.experiment.classes or []
        named = {names[label] if label < len(names) else str(label): shown[label] for label in sorted(shown)}
        legend_above(figure, named)
        for handle in figure.legends[0].legend_handles:
            handle.set_sizes([30])
    return figure


_DRAWN: Mapping[str, Callable[[Table], Any]] = {
    "cumulative": cumulative_error,
    "bars": bars,
    "heatmap": heatmap,
    "time": error_against_time,
    "tsne": features,
}
