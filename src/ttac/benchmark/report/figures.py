"""Figures from tables, records and points, in one look: error over the stream and against time, bars, a heat map."""

from __future__ import annotations

import io
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ttac.benchmark.report.published import MEAN, NO_PROTOCOL
from ttac.benchmark.report.results import ExperimentResults, RunResult
from ttac.benchmark.report.tables import Row, Table, readable, whole_runs
from ttac.benchmark.runs import PlannedRun
from ttac.common.files import replacing
from ttac.evaluation.records import Record

Curve = tuple[Sequence[float], Sequence[float]]  # samples so far, error so far
Point = tuple[float, float]  # seconds a sample, error

# A page with a dark side replaces these three, which nothing else has.
INK, FAINT, PAPER = "#22252b", "#d9dce1", "#fffffe"
# Okabe and Ito's colours, which colour-blind readers tell apart, then more that show on white and on black.
PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
    "#b04a78", "#999933", "#7d6fd6", "#44aa99", "#aa4499", "#7f7f7f", "#b8860b",
)  # fmt: skip
_OWN = {
    "TEST": "#7f7f7f", "BN": "#e69f00", "TENT": "#009e73", "T3A": "#cc79a7", "SHOT": "#999933",
    "Conjugate PL": "#aa4499", "Self-Training": "#44aa99", "AdaContrast": "#b04a78", "TTT-R": "#b8860b",
    "TTT++": "#7d6fd6", "TTAC": "#0072b2", "TTAC+SHOT": "#56b4e9", "TTAC++": "#d55e00",
}  # fmt: skip
_DASHES = ("--", "-.", ":", (0, (6, 1.5)), (0, (4, 1, 1, 1, 1, 1)))
_MARKERS = "osD^vPX*"
FEW = 3  # domains or columns that have a panel of their own
DPI = 130


def colours(names: Iterable[str]) -> dict[str, str]:
    """Give each name a colour: the methods their own, other names those that are left.

    >>> colours(["TTAC", "TTAC with a queue"])
    {'TTAC': '#0072b2', 'TTAC with a queue': '#d55e00'}
    """
    names = list(dict.fromkeys(names))
    taken = {_OWN[name] for name in names if name in _OWN}
    left = [colour for colour in PALETTE if colour not in taken] or list(PALETTE)
    others = [name for name in names if name not in _OWN]
    chosen = {name: left[index % len(left)] for index, name in enumerate(others)}
    return {name: _OWN.get(name) or chosen[name] for name in names}


@contextmanager
def look(salt: str = "ttac") -> Iterator[None]:
    """Give figures that are drawn and saved inside the common look."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("figures are drawn by matplotlib: pip install 'ttac[report]' or 'ttac[demo]'") from error
    mpl.use("Agg")
    settings: dict[Any, Any] = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), PAPER),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        "grid.color": FAINT, "axes.axisbelow": True, "figure.constrained_layout.use": True, "font.size": 9,
        # Titles come from records: a dollar sign in them is no formula. Ids in an SVG are the same each time.
        "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": salt,
    }  # fmt: skip
    with mpl.rc_context(settings):
        yield


def new_panels(
    count: int, columns: int, size: Callable[[int, int], tuple[float, float]], **options: Any
) -> tuple[Any, Any]:
    """Make a figure of so many panels, at most `columns` side by side, and give it with the grid of its axes.

    `size` goes by the rows and columns that it has.
    """
    from matplotlib import pyplot as plt

    columns = min(columns, count)
    rows = -(-count // columns)
    figure, grid = plt.subplots(rows, columns, figsize=size(rows, columns), squeeze=False, **options)
    for axes in list(grid.flat)[count:]:
        axes.set_visible(False)
    return figure, grid


def render(figure: Any, name: str, kinds: Sequence[str]) -> dict[str, bytes]:
    """Give a figure in each of the formats, the same bytes each time, and free its memory."""
    from matplotlib import pyplot as plt

    files = {}
    for kind in kinds:
        file = io.BytesIO()
        with look(name):
            figure.savefig(file, format=kind, dpi=DPI, metadata={"Date": None} if kind == "svg" else {})
        files[kind] = file.getvalue()
    plt.close(figure)
    return files


def plot_cumulative_error(panels: Mapping[str, Mapping[str, Record]], path: Path) -> None:
    """Draw the error so far over the samples so far: one panel a domain, one line a method, as PNG."""
    curves = {
        domain: {name: _curve([record]) for name, record in records.items()} for domain, records in panels.items()
    }
    with look():
        figure = draw_curves(curves)
    with replacing(path) as draft:
        draft.write_bytes(render(figure, path.stem, ["png"])["png"])


def cumulative_error(table: Table) -> Any | None:
    """Draw the error so far of an experiment's runs: a panel a protocol, and a domain or column where they are few."""
    split, mean = _splitting(table.experiment)
    panels: dict[str, dict[str, Curve]] = {}
    parts: dict[str, None] = {}
    for group in panel_groups(table):
        records: dict[str, dict[str, list[Record]]] = {}
        for row in table.with_reference(group):
            for done in whole_runs(table, row, every_column=bool(mean)):
                if done.record.cumulative_error:
                    records.setdefault(split(done.run), {}).setdefault(row.title, []).append(done.record)
        own = {row.title for row in table.of(group)}
        for part in [part for part, rows in records.items() if own & rows.keys()]:
            title = ", ".join(word for word in (group, part or mean) if word not in ("", NO_PROTOCOL))
            panels[title] = {row: _curve(found) for row, found in records[part].items()}
            parts[part] = None
    references = {row.title for row in table.of(NO_PROTOCOL)}
    return draw_curves(panels, references, len(parts) if 1 < len(parts) <= FEW else None) if panels else None


def panel_groups(table: Table) -> list[str]:
    """Give the groups that have panels: what is not adapted is drawn beside the others, if there are any."""
    return [group for group in table.groups if group != NO_PROTOCOL] or table.groups


def _splitting(experiment: ExperimentResults) -> tuple[Callable[[PlannedRun], str], str]:
    """Choose what has panels of its own, columns or else domains, and say what a panel is the mean of otherwise."""
    columns = {run.column for run in experiment.places}
    domains = {run.domain or run.target for run in experiment.places}
    if 1 < len(columns) <= FEW:
        return (lambda run: readable(run.column)), ""
    if len(columns) == 1 < len(domains) <= FEW:
        return (lambda run: readable(run.domain or run.target)), ""
    streams = max(len(columns), len({run.part for run in experiment.places}))
    return (lambda run: ""), f"mean over {streams} streams" if streams > 1 else ""


def _curve(records: Sequence[Record]) -> Curve:
    """Average curves where all of them have samples."""
    curves = [np.array(record.cumulative_error, dtype=float) for record in records]
    last = min(curve[-1, 0] for curve in curves)
    grid = curves[0][curves[0][:, 0] <= last, 0]
    mean = np.mean([np.interp(grid, curve[:, 0], curve[:, 1]) for curve in curves], axis=0)
    return grid.tolist(), mean.tolist()


def draw_curves(
    panels: Mapping[str, Mapping[str, Curve]], references: Container[str] = (), columns: int | None = None
) -> Any:
    """Draw panels of curves with one legend; those of the TTAC family are solid and thicker.

    Limits leave `references` out, which would press the others together: those outside are written at the edge.
    """
    columns = columns or (2 if len(panels) == 4 else 3)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    figure, grid = new_panels(
        len(panels), columns, lambda rows, wide: (max(3.1, 5.2 - wide) * wide, (2.5 if rows <= 2 else 2.0) * rows + 0.7)
    )
    colour = colours(names)
    plain = [name for name in names if not _is_family(name)]
    handles = {}
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=False):
        for name, (samples, errors) in curves.items():
            dashes = "-" if _is_family(name) else _DASHES[plain.index(name) % len(_DASHES)]
            width, order = (2.2, 2.0) if _is_family(name) else (1.2, 2.1)  # a thick line would hide a thin one
            (handles[name],) = axes.plot(
                samples, errors, color=colour[name], linestyle=dashes, linewidth=width, zorder=order
            )
        axes.set_title(title, fontsize=9.5)
        # Errors of few samples leap: the first tenth of a stream is left out.
        settled = {name: list(errors)[len(errors) // 10 :] for name, (_, errors) in curves.items()}
        own = [error for name, errors in settled.items() for error in errors if name not in references]
        set_limits(axes, own, {name: errors[-1] for name, errors in settled.items() if name in references})
        axes.grid(color=FAINT)
    figure.supxlabel("samples so far", fontsize=9)
    figure.supylabel("error so far (%)", fontsize=9)
    legend_above(figure, {name: handles[name] for name in names})
    return figure


def legend_above(figure: Any, handles: Mapping[str, Any]) -> None:
    """Place one legend above all panels, as wide as the figure."""
    if not handles:
        return
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", frameon=False, fontsize=8.5,
        ncols=min(len(handles), max(2, int(figure.get_figwidth() / 1.45))),
    )  # fmt: skip


def _is_family(name: str) -> bool:
    return name.startswith("TTAC")


def set_limits(axes: Any, values: Sequence[float], references: Mapping[str, float]) -> dict[str, float]:
    """Fit the errors on the axes to `values`, write the references outside at the edge, and give those inside."""
    values = values or list(references.values())
    margin = max(1.0, 0.08 * (max(values) - min(values)))
    low, high = max(0.0, min(values) - margin), max(values) + margin
    axes.set_ylim(low, high)
    above = [f"{name} {value:.1f}" for name, value in references.items() if value > high]
    below = [f"{name} {value:.1f}" for name, value in references.items() if value < low]
    for place, edge, texts in ((0.98, "top", above), (0.02, "bottom", below)):
        if texts:
            axes.text(
                0.985, place, ", ".join(texts), transform=axes.transAxes, ha="right", va=edge, fontsize=8.5,
                bbox={"facecolor": PAPER, "edgecolor": FAINT, "boxstyle": "round,pad=0.25", "linewidth": 0.6},
            )  # fmt: skip
    return {name: value for name, value in references.items() if low <= value <= high}


def draw(kind: str, table: Table) -> Any | None:
    """Draw a figure of an experiment, None where it has no records for it."""
    if not table.rows:
        return None
    with look():
        return _DRAWN[kind](table)


def bars(table: Table) -> Any | None:
    """Draw a bar for each number: a panel a protocol, what is not adapted beside each."""
    groups = [group for group in panel_groups(table) if any(row.whole_cells for row in table.of(group))]
    if not groups:
        return None
    figure, grid = new_panels(len(groups), 1, lambda rows, _: (9.5, 2.1 * rows + 0.9), sharex=True)
    colour = colours(row.title for row in table.rows)
    handles = {}
    for axes, group in zip(grid.flat, groups, strict=True):
        rows = [row for row in table.with_reference(group) if row.whole_cells]
        width = 0.86 / len(rows)
        for index, row in enumerate(rows):
            cells = row.whole_cells.values()
            left = [table.columns.index(column) - 0.43 + (index + 0.5) * width for column in row.whole_cells]
            handles[row.title] = axes.bar(left, [cell.mean for cell in cells], width * 0.94, color=colour[row.title])
            spread = [(x, cell) for x, cell in zip(left, cells, strict=True) if cell.std is not None]
            axes.errorbar(
                [x for x, _ in spread], [cell.mean for _, cell in spread], [cell.std for _, cell in spread],
                fmt="none", ecolor=INK, elinewidth=0.8,
            )  # fmt: skip
        axes.set_ylabel(table.unit)
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
    height = 1.2 + 0.42 * len(table.rows)
    figure, grid = new_panels(len(panels), len(panels), lambda *_: (width, height), sharey=True)
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
        axes.set_title(f"{table.unit}, {title}", fontsize=9.5)
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
    width = 8.6 if len(panels) == 1 else 10.0
    figure, grid = new_panels(len(panels), 2, lambda rows, _: (width, 1 + max(4, 3.1 * rows)))
    colour = colours(row.title for row in table.rows)
    names = dict.fromkeys(name for points in panels.values() for row in points.values() for name in row)
    markers = {name: _MARKERS[index % len(_MARKERS)] for index, name in enumerate(names)}
    drawn = []
    for axes, (group, points) in zip(grid.flat, panels.items(), strict=False):
        drawn.append(_draw_times(axes, points, {row.title for row in table.of(group)}, colour, markers))
        axes.set_title("" if group == NO_PROTOCOL else group, fontsize=9.5)
    figure.supylabel("error (%)", fontsize=9)
    figure.supxlabel("seconds a sample (log scale)", fontsize=9)
    if len(markers) > 1:
        empty = partial(grid.flat[0].scatter, [], [], color=INK, s=36)
        legend_above(figure, {name: empty(marker=marker) for name, marker in markers.items()})
    figure.canvas.draw()  # settles where points are on the paper
    for axes, shown in zip(grid.flat, drawn, strict=False):
        _label(figure, axes, shown)
    return figure


def _times_and_errors(table: Table, group: str) -> dict[str, dict[str, Point]]:
    """Give the points of each row, by column in a table of times; means over a part of the domains are left out."""
    points = {}
    for row in table.with_reference(group):
        shown: dict[str, Sequence[RunResult]] = {"": whole_runs(table, row, True)}
        if table.experiment.metric == "seconds":
            shown = {column: cell.done for column, cell in row.whole_cells.items() if column != MEAN}
        points[row.title] = {name: _time_and_error(done) for name, done in shown.items() if done}
    return {title: known for title, known in points.items() if known}


def _draw_times(
    axes: Any,
    rows: Mapping[str, Mapping[str, Point]],
    own: AbstractSet[str],
    colour: Mapping[str, str],
    mark: Mapping[str, str],
) -> dict[str, list[Point]]:
    """Draw the points of a panel, and give those that it shows, by row and from the fastest."""
    from matplotlib.ticker import LogLocator

    errors = [error for title, points in rows.items() if title in own for _, error in points.values()]
    without = {title: fmean(error for _, error in rows[title].values()) for title in rows if title not in own}
    inside = set_limits(axes, errors, without)
    drawn = {title: sorted(points.values()) for title, points in rows.items() if title in own or title in inside}
    for title, points in drawn.items():
        axes.plot(*zip(*points, strict=True), color=colour[title], linewidth=1, alpha=0.6)
        for name, point in rows[title].items():
            axes.scatter(*point, color=colour[title], marker=mark[name], s=42, zorder=3)
    axes.margins(x=0.14)
    axes.set_xscale("log")
    times = [time for points in drawn.values() for time, _ in points]
    steps = (1, 2, 5) if max(times) > 3 * min(times) else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    axes.xaxis.set_major_locator(LogLocator(10, steps))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.grid(color=FAINT, which="both", linewidth=0.6)
    return drawn


def _time_and_error(done: Sequence[RunResult]) -> Point:
    seconds = fmean(each.record.seconds / each.record.samples for each in done)
    return max(seconds, 1e-9), fmean(each.record.error or 0.0 for each in done)


def _label(figure: Any, axes: Any, rows: Mapping[str, Sequence[Point]]) -> None:
    """Write names beside last points, each at the first of several places where it covers nothing that is there."""
    from matplotlib.transforms import Bbox

    unit = figure.dpi / 72
    points = axes.transData.transform([point for points in rows.values() for point in points])
    taken = [Bbox.from_bounds(x, y, 0, 0).padded(3.5 * unit) for x, y in points]
    taken += [text.get_window_extent() for text in axes.texts]
    places = [(side, dy) for dy in (0, 9, -9, 18, -18, 27, -27, 36, -36, 45, -45, 54, -54) for side in (1, -1)]
    for name, (*_, point) in rows.items():
        x, y = axes.transData.transform(point)
        wide, high = 5.6 * unit * len(name), 9 * unit
        for side, dy in places:
            left = x + 7 * unit if side > 0 else x - 7 * unit - wide
            box = Bbox.from_bounds(left, y + (dy - 4.5) * unit, wide, high)
            inside = all(axes.bbox.contains(*corner) for corner in box.corners())
            if inside and not box.count_overlaps(taken):
                break
        taken.append(box)
        thread = {"arrowstyle": "-", "color": INK, "linewidth": 0.5, "alpha": 0.5} if dy else None
        axes.annotate(
            name, point, (7 * side, dy), textcoords="offset points", va="center", fontsize=8.5,
            ha="left" if side > 0 else "right", arrowprops=thread,
        )  # fmt: skip


def features(table: Table) -> Any | None:
    """Draw the features that t-SNE laid out, coloured by true class: a panel a method."""
    kept = [done for done in table.experiment.done if done.points is not None]
    kept = [done for done in kept if (done.run.part, done.run.seed) == (kept[0].run.part, kept[0].run.seed)]
    if not kept:
        return None
    figure, grid = new_panels(len(kept), 3, lambda rows, columns: (3.1 * columns, 3.1 * rows + 0.5))
    shown: dict[int, Any] = {}
    for axes, done in zip(grid.flat, kept, strict=False):
        points, labels = done.points.points, done.points.labels  # type: ignore[union-attr]
        for label in np.unique(labels).tolist():
            chosen = points[labels == label]
            # As pixels: thousands of circles would weigh megabytes on a page.
            colour = PALETTE[label % len(PALETTE)]
            shown[label] = axes.scatter(*chosen.T, s=5, linewidths=0, color=colour, rasterized=True)
        protocol = "" if done.run.group == NO_PROTOCOL else f" ({done.run.group})"
        axes.set_title(f"{done.run.row}{protocol}\n{done.record.error:.2f} % error", fontsize=9.5)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[["left", "bottom"]].set_visible(False)
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
