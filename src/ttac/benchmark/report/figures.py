"""Figures from tables and points: bars, a heat map, error against time, and features in the plane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from statistics import fmean
from typing import Any

import numpy as np

from ttac.benchmark.report.plots import (
    FAINT,
    INK,
    PALETTE,
    PAPER,
    colours,
    cumulative_error,
    legend_above,
    look,
    new_figure,
    panel_groups,
    set_limits,
)
from ttac.benchmark.report.published import MEAN, NO_PROTOCOL
from ttac.benchmark.report.results import Done
from ttac.benchmark.report.tables import UNITS, Row, Table, readable, whole_runs

_MARKERS = "osD^vPX*"
Point = tuple[float, float]  # seconds a sample, error
Box = tuple[float, float, float, float]


def draw(kind: str, table: Table) -> Any | None:
    """Draw a figure of an experiment, None where it has no records for it."""
    if not table.rows:
        return None
    with look():
        return _DRAWN[kind](table)


def bars(table: Table) -> Any | None:
    """Draw a bar for each number: a panel a protocol, what is not adapted beside each."""
    groups = [group for group in panel_groups(table) if any(map(_has_bars, table.of(group)))]
    if not groups:
        return None
    figure, grid = new_figure(len(groups), 1, 9.5, 2.1 * len(groups) + 0.9, sharex=True)
    colour = colours(row.title for row in table.rows)
    handles = {}
    for axes, group in zip(grid.flat, groups, strict=True):
        rows = list(filter(_has_bars, table.with_reference(group)))
        width = 0.86 / len(rows)
        for index, row in enumerate(rows):
            places = [place for place, column in enumerate(table.columns) if column in row.cells]
            places = [place for place in places if row.cells[table.columns[place]].whole]
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


def _has_bars(row: Row) -> bool:
    return any(cell.whole for cell in row.cells.values())


def heatmap(table: Table) -> Any | None:
    """Draw the table as coloured squares, the paper's beside it where it has all of them."""
    columns = [column for column in table.columns if column != MEAN]
    measured = _matrix(table.rows, columns, lambda cell: cell.mean if cell.whole else None)
    if not np.isfinite(measured).any():
        return None
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
    """Draw error over seconds a sample, a panel a protocol; a table of times has a point for each number, others one
    for each row."""
    found = {group: _times_and_errors(table, group) for group in panel_groups(table)}
    panels = {group: rows for group, rows in found.items() if rows.keys() & {row.title for row in table.of(group)}}
    if not panels:
        return None
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = new_figure(rows, columns, 8.6 if columns == 1 else 10.0, 1.0 + (4.0 if rows == 1 else 3.1 * rows))
    colour = colours(row.title for row in table.rows)
    names = dict.fromkeys(name for points in panels.values() for row in points.values() for name in row)
    markers = {name: _MARKERS[index % len(_MARKERS)] for index, name in enumerate(names)}
    drawn = []
    for axes, (group, points) in zip(grid.flat, panels.items(), strict=False):
        drawn.append(_draw_times(axes, points, {row.title for row in table.of(group)}, colour, markers))
        axes.set_title("" if group == NO_PROTOCOL else group, fontsize=9.5)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.supylabel("error (%)", fontsize=9)
    figure.supxlabel("seconds a sample (log scale)", fontsize=9)
    if len(markers) > 1:
        made = {name: grid.flat[0].scatter([], [], color=INK, marker=mark, s=36) for name, mark in markers.items()}
        legend_above(figure, made)
    figure.canvas.draw()  # settles where points are on the paper
    for axes, shown in zip(grid.flat, drawn, strict=False):
        _label(figure, axes, shown)
    return figure


def _times_and_errors(table: Table, group: str) -> dict[str, dict[str, Point]]:
    """Give the points of each row, by column in a table of times; means over a part of the domains are left out."""
    points = {}
    for row in table.with_reference(group):
        shown: dict[str, Sequence[Done]] = {"": whole_runs(table, row, True)}
        if table.experiment.metric == "seconds":
            shown = {column: cell.done for column, cell in row.cells.items() if column != MEAN and cell.whole}
        known = {name: _time_and_error(done) for name, done in shown.items() if done}
        if known:
            points[row.title] = known
    return points


def _draw_times(
    axes: Any,
    rows: Mapping[str, Mapping[str, Point]],
    own: AbstractSet[str],
    colour: Mapping[str, str],
    mark: Mapping[str, str],
) -> dict[str, list[Point]]:
    """Draw the points of a panel, and give those that it shows, by row and from the fastest."""
    errors = [error for title, points in rows.items() if title in own for _, error in points.values()]
    without = {title: fmean(error for _, error in rows[title].values()) for title in rows if title not in own}
    inside = set_limits(axes, errors, without)
    drawn = {title: sorted(points.values()) for title, points in rows.items() if title in own or title in inside}
    for title, points in drawn.items():
        axes.plot(*zip(*points, strict=True), color=colour[title], linewidth=1, alpha=0.6)
        for name, point in rows[title].items():
            axes.scatter(*point, color=colour[title], marker=mark[name], s=42, zorder=3)
    axes.margins(x=0.14)
    _scale_of_times(axes, [time for points in drawn.values() for time, _ in points])
    axes.grid(color=FAINT, which="both", linewidth=0.6)
    return drawn


def _scale_of_times(axes: Any, times: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    steps = (1, 2, 5) if max(times) > 3 * min(times) else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    axes.xaxis.set_major_locator(LogLocator(10, steps))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")


def _time_and_error(done: Sequence[Done]) -> Point:
    seconds = fmean(each.record.seconds / each.record.samples for each in done)
    return max(seconds, 1e-9), fmean(each.record.error or 0.0 for each in done)


def _label(figure: Any, axes: Any, rows: Mapping[str, Sequence[Point]]) -> None:
    """Write names beside last points, each at the first of several places where it covers nothing that is there."""
    unit = figure.dpi / 72
    half = 3.5 * unit
    points = axes.transData.transform([point for points in rows.values() for point in points])
    taken: list[Box] = [(x - half, y - half, x + half, y + half) for x, y in points]
    taken += [text.get_window_extent().extents for text in axes.texts]
    places = [(side, dy) for dy in (0, 9, -9, 18, -18, 27, -27, 36, -36, 45, -45, 54, -54) for side in (1, -1)]
    for name, (*_, point) in rows.items():
        x, y = axes.transData.transform(point)
        wide, high = 5.6 * unit * len(name), 9 * unit
        for side, dy in places:
            left = x + 7 * unit if side > 0 else x - 7 * unit - wide
            box = (left, y + (dy - 4.5) * unit, left + wide, y + (dy - 4.5) * unit + high)
            if _inside(box, axes.bbox.extents) and not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        thread = {"arrowstyle": "-", "color": INK, "linewidth": 0.5, "alpha": 0.5} if dy else None
        axes.annotate(
            name, point, (7 * side, dy), textcoords="offset points", va="center", fontsize=8.5,
            ha="left" if side > 0 else "right", arrowprops=thread,
        )  # fmt: skip


def _inside(a: Box, b: Box) -> bool:
    return b[0] <= a[0] and a[2] <= b[2] and b[1] <= a[1] and a[3] <= b[3]


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
