"""One page with everything on it: tables that sort, figures, and the records behind each number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from ttac import __version__
from ttac.benchmark.report.orders import RULES, Ordering
from ttac.benchmark.report.plots import FAINT, INK, PAPER
from ttac.benchmark.report.published import MEAN, NO_PROTOCOL
from ttac.benchmark.report.results import Done, Experiment
from ttac.benchmark.report.tables import Cell, Table, readable, values_of
from ttac.benchmark.report.writers import (
    OTHER_SCALES,
    PAPER_SCALE,
    counted,
    legend,
    link,
    number,
    of_other_scale,
    order_sentence,
    paper_number,
    plural,
    swap_lines,
)
from ttac.evaluation.protocols import PROTOCOLS

CAPTIONS = {
    "cumulative": "Error so far over a stream. The TTAC family is solid and thicker; what lies outside is at an edge.",
    "bars": "Every number of the table as a bar; whiskers are standard deviations over seeds.",
    "heatmap": "The table as colours: lighter is lower. Each panel has its own scale.",
    "time": "Error against time: to the lower left is better; what lies outside is at an edge.",
    "tsne": "Features of the target samples laid out by t-SNE, coloured by their true classes.",
}


@dataclass(frozen=True)
class Section:
    """An experiment at a scale as the report shows it."""

    table: Table
    ordering: Ordering
    figures: Mapping[str, Mapping[str, bytes]]  # the files of each kind, by their suffix

    def file(self, kind: str, suffix: str) -> str:
        """Name the file of a figure, seen from the report."""
        return f"figures/{self.table.experiment.key}-{kind}.{suffix}"


@dataclass
class _Details:
    """What the page's script shows of a number: cells point to records, and records to environments."""

    base: Path
    cells: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    environments: list[str] = field(default_factory=list)
    _places: dict[Path, int] = field(default_factory=dict)

    def add(self, title: str, text: str, cell: Cell, table: Table, column: str) -> int:
        """Keep a cell, and give its place."""
        note = f"n = {plural(cell.n, cell.over.removesuffix('s'))}, {plural(len(cell.done), 'record')}"
        if cell.lacking:
            note += f"; partial: {cell.lacking}"
        paper = paper_number(cell, table.digits)
        records = [[self._record(done), _value(table, done, column)] for done in cell.done]
        self.cells.append({"title": title, "text": text, "note": note, "paper": paper, "records": records})
        return len(self.cells) - 1

    def _record(self, done: Done) -> int:
        if done.path in self._places:
            return self._places[done.path]
        record, facts = done.record, done.record.provenance
        environment = _versions(facts, ("pillow", "platform", "processor"))
        if environment not in self.environments:
            self.environments.append(environment)
        where = [done.run.target, done.run.domain, done.run.severity and f"severity {done.run.severity}"]
        self.records.append(
            {
                "where": ", ".join(str(each) for each in where if each),
                "seed": done.run.seed,
                "error": f"{record.error:.2f} %",
                "samples": record.samples,
                "seconds": f"{record.seconds:.1f}",
                "command": str(facts.get("command", "unknown")),
                "commit": str(facts.get("commit") or "unknown"),
                "weights": str(facts.get("model") or "unknown"),
                "time": str(facts.get("time", "unknown")),
                "environment": self.environments.index(environment),
                "href": link(done.path, self.base),
                "file": done.path.name,
            }
        )
        self._places[done.path] = len(self.records) - 1
        return self._places[done.path]


def _value(table: Table, done: Done, column: str) -> str:
    """Print what a record adds to a cell; to a mean over classes it adds its own."""
    values = values_of(table.experiment, done)
    unit = " s a sample" if table.experiment.metric == "seconds" else " %"
    return number(values.get(column, fmean(values.values())), table.digits) + unit


def _versions(facts: Mapping[str, Any], more: Sequence[str] = ()) -> str:
    keys = ("ttac", "python", "torch", "numpy", *more)
    return ", ".join(f"{key} {facts[key]}" for key in keys if facts.get(key) is not None)


def render_page(sections: Sequence[Section], out: Path) -> str:
    """Render the page as it stands in the folder `out`."""
    import jinja2

    template = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    ).from_string((files("ttac.benchmark.report") / "page.html").read_text(encoding="utf-8"))
    details = _Details(out)
    shown = [_section(section, details, out) for section in sections]
    return template.render(
        sections=shown,
        facts=_facts([section.table.experiment for section in sections]),
        details={"cells": details.cells, "records": details.records, "environments": details.environments},
        compared=any(section.table.compared for section in sections),
        other_scales=OTHER_SCALES if any(of_other_scale(section.table) for section in sections) else "",
        version=__version__,
    )


def _section(section: Section, details: _Details, out: Path) -> dict[str, Any]:
    table = section.table
    experiment = table.experiment
    key = experiment.key
    below = "below each number" + (", with the difference," if experiment.scale == PAPER_SCALE else "")
    return {
        "key": key,
        "experiment": experiment,
        "counted": counted(table),
        "columns": [{"name": name, "shown": readable(name), "mean": name == MEAN} for name in _columns(table)],
        "groups": [_group(table, group, details) for group in table.groups],
        "missing": len(experiment.runs) - len(experiment.done) - len(experiment.failed),
        "legend": legend(table, below),
        "order": order_sentence(section.ordering) if section.ordering.compared else "",
        "swaps": swap_lines(table, section.ordering),
        "rule": RULES[experiment.metric],
        "figures": [_figure(section, kind) for kind in section.figures],
        "files": [(suffix, f"tables/{key}.{suffix}") for suffix in ("md", "csv", "tex")],
        "failed": [
            {"name": each.run.name, "error": each.error.strip(), "href": link(each.path, out)}
            for each in experiment.failed
        ],
        "sources": table.sources if table.compared else (),
    }


def _columns(table: Table) -> list[str]:
    """Give the columns with the mean first, where a narrow screen shows it."""
    return sorted(table.columns, key=lambda column: column != MEAN)


def _figure(section: Section, kind: str) -> dict[str, Any]:
    text = section.figures[kind]["svg"].decode()
    width = text.partition(' viewBox="0 0 ')[2].partition(" ")[0]  # in points
    return {
        "caption": CAPTIONS[kind],
        "svg": inline_svg(text, f"{section.table.experiment.key}-{kind}-", CAPTIONS[kind]),
        "wide": round(float(width) * 4 / 3),  # in pixels
        "png": section.file(kind, "png"),
        "file": section.file(kind, "svg"),
    }


def _group(table: Table, group: str, details: _Details) -> dict[str, Any]:
    rows = []
    for row in table.of(group):
        cells = []
        for column in _columns(table):
            cell = row.cells.get(column)
            where = ", ".join(each for each in (row.title, group, column) if each != NO_PROTOCOL)
            cells.append(None if cell is None else _shown(where, cell, column, table, details))
        rows.append({"title": row.title, "cells": cells, "seeds": row.seeds})
    return {"name": group, "means": describe_group(group), "rows": rows}


def _shown(where: str, cell: Cell, column: str, table: Table, details: _Details) -> dict[str, Any]:
    digits = table.digits
    mean = number(cell.mean, digits)
    std = "" if cell.std is None else number(cell.std, digits)
    text = f"{mean} ± {std}" if std else mean
    difference = ""
    if cell.published is not None and table.experiment.scale == PAPER_SCALE:
        difference = f"{cell.mean - cell.published:+.{digits}f}".replace("-", "−")  # noqa: RUF001
    return {
        "index": details.add(where, text, cell, table, column),
        "value": repr(cell.mean),
        "mean": mean,
        "std": std,
        "best": cell.best,
        "lacking": cell.lacking,
        "paper": paper_number(cell, digits),
        "difference": difference,
        "label": f"{where}: {text}",
    }


def describe_group(group: str) -> str:
    """Say what a protocol allows, in words.

    >>> describe_group("N-O-SF")
    'plain source training, one pass, the weights alone'
    """
    if group == NO_PROTOCOL:
        return "no adaptation"
    if group not in PROTOCOLS:
        return ""
    protocol = PROTOCOLS[group]
    training = "source training with a branch" if protocol.modified_objective else "plain source training"
    passes = "one pass" if protocol.passes == "one" else "several passes"
    source = "the weights alone" if protocol.source == "free" else "weights and source statistics"
    return f"{training}, {passes}, {source}"


def _facts(experiments: Sequence[Experiment]) -> list[tuple[str, str]]:
    """Sum up what was run, where and when."""
    done = [each for experiment in experiments for each in experiment.done]
    records = [each.record for each in done]
    known = [record.provenance for record in records]
    runs = sum(len(experiment.runs) for experiment in experiments)
    times = sorted(str(facts["time"]) for facts in known if "time" in facts)
    machines = (
        f"{facts.get('processor') or facts.get('platform', 'unknown')}, {facts.get('cpus', '?')} cores, "
        f"{facts.get('threads', '?')} of them used by a run, device {facts.get('device', 'unknown')}"
        for facts in known
    )
    return [
        ("Runs", f"{len(done)} of {runs}, over {plural(len(experiments), 'table')}"),
        ("Scales", _different(experiment.scale for experiment in experiments)),
        ("Samples", f"{sum(record.samples for record in records):,} predicted"),
        ("Time", f"{sum(record.seconds for record in records) / 3600:.1f} hours of streams"),
        ("When", f"{times[0][:10]} to {times[-1][:10]}" if times else "unknown"),
        ("Machine", _different(machines)),
        ("Versions", _different(map(_versions, known))),
        ("Commit", _different(_short(facts.get("commit")) for facts in known)),
    ]


def _different(values: Iterable[str], most: int = 4) -> str:
    found = list(dict.fromkeys(values))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return "; ".join(found[:most]) + more


def inline_svg(text: str, prefix: str, label: str) -> Any:
    """Make matplotlib's SVG part of a page: ids of its own, colours that follow the page, nothing that it links to."""
    from markupsafe import Markup, escape

    body = text[text.index("<svg") :]
    body = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}\1"', body)
    body = re.sub(r'href="#([^"]*)"', rf'href="#{prefix}\1"', body)
    body = re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}\1)", body)
    for colour, name in {INK: "ink", FAINT: "faint", PAPER: "card"}.items():
        body = re.sub(rf"(fill|stroke): {colour}\b", rf"\1: var(--{name}, {colour})", body)
    return Markup(body.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1))


def _short(commit: object) -> str:
    """Cut a commit's hash, and keep the mark of changed files.

    >>> _short("85f58c4b90351254f4b706a34fb1b4b1f0ca2898+"), _short(None)
    ('85f58c4b90+', 'unknown')
    """
    text = str(commit or "unknown")
    return text[:10] + ("+" if text[10:].endswith("+") else "")
