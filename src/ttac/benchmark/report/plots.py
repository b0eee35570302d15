"""The look of all figures, and the error over the stream."""

from __future__ import annotations

import io
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ttac.benchmark.report.published import NO_PROTOCOL
from ttac.benchmark.report.results import Experiment, Run
from ttac.benchmark.report.tables import Table, readable, whole_runs
from ttac.common.files import replacing
from ttac.evaluation.records import Record

Curve = tuple[Sequence[float], Sequence[float]]  # samples so far, error so far

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
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = dict.fromkeys(ink, INK)
    settings |= {"grid.color": FAINT, **dict.fromkeys(("figure.facecolor", "axes.facecolor"), PAPER), "font.size": 9}
    # Titles come from records: a dollar sign in them is no formula. Ids in an SVG are the same each time.
    settings |= {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": salt}
    with mpl.rc_context(settings):
        yield


def new_figure(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """Make a figure of panels, and give it with the grid of its axes."""
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained", **options)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
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


def plot_cumulative_error(panels: Mapping[str, Mapping[str, Record]], path: Path | str) -> None:
    """Draw the error so far over the samples so far: one panel a domain, one line a method."""
    curves = {
        domain: {name: _curve([record]) for name, record in records.items()} for domain, records in panels.items()
    }
    with look():
        figure = draw_curves(curves)
    path = Path(path)
    kind = path.suffix.lstrip(".") or "png"
    with replacing(path) as draft:
        draft.write_bytes(render(figure, path.stem, [kind])[kind])


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


def _splitting(experiment: Experiment) -> tuple[Callable[[Run], str], str]:
    """Choose what has panels of its own, and say what a panel is the mean of otherwise."""
    parts = {run.part for run in experiment.places}
    columns = {run.column for run in experiment.places}
    if len(parts) == 1 == len(columns):
        return (lambda run: ""), ""
    if len(parts) <= FEW and len(columns) in (1, len(parts)):
        several = len({run.severity for run in experiment.places}) > 1
        return (lambda run: readable(run.domain or run.target) + (f", level {run.severity}" if several else "")), ""
    groups = {run.group for run in experiment.places} - {NO_PROTOCOL}
    if len(columns) > 1 and (len(columns) <= FEW or len(columns) * len(groups) <= 2 * FEW):
        return (lambda run: run.column), ""
    return (lambda run: ""), f"mean over {max(len(parts), len(columns))} streams"


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
    columns = columns or (2 if len(panels) == 4 else min(3, len(panels)))
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    width, height = max(3.1, 5.2 - columns), 2.5 if rows <= 2 else 2.0
    figure, grid = new_figure(rows, columns, width * columns, height * rows + 0.7)
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
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
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
