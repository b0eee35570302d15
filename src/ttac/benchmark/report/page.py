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
from ttac.benchmark.report import writers
from ttac.benchmark.report.figures import FAINT, INK, PAPER
from ttac.benchmark.report.orders import RULES, Ordering
from ttac.benchmark.report.published import MEAN, NO_PROTOCOL
from ttac.benchmark.report.results import ExperimentResults, RunResult
from ttac.benchmark.report.tables import DIGITS, Cell, Row, Table, readable, values_of
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
class Details:
    """What the page's script shows of a number: cells point to records, and records to environments."""

    base: Path
    cells: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    environments: list[str] = field(default_factory=list)
    _places: dict[Path, int] = field(default_factory=dict)

    def add(self, table: Table, row: Row, column: str) -> int:
        """Keep a cell, and give its place."""
        cell = row.cells[column]
        note = f"n = {writers.plural(cell.n, cell.over.removesuffix('s'))}, {writers.plural(len(cell.done), 'record')}"
        self.cells.append(
            {
                "title": ", ".join(each for each in (row.title, row.group, column) if each != NO_PROTOCOL),
                "text": writers.number(cell.mean, table.digits, cell.std),
                "note": note + (f"; partial: {cell.lacking}" if cell.lacking else ""),
                "paper": writers.paper_number(cell, table.digits),
                "records": [[self._record(done), _value(table, done, column)] for done in cell.done],
            }
        )
        return len(self.cells) - 1

    def _record(self, done: RunResult) -> int:
        if done.path in self._places:
            return self._places[done.path]
        record, run, facts = done.record, done.run, done.record.provenance
        environment = _versions(facts, ("pillow", "platform", "processor"))
        if environment not in self.environments:
            self.environments.append(environment)
        where = [run.target, run.domain, run.severity and f"severity {run.severity}"]
        known = {key: str(facts.get(key) or "unknown") for key in ("command", "commit", "time")}
        self.records.append(
            {
                **known,
                "where": ", ".join(str(each) for each in where if each),
                "seed": run.seed,
                "error": f"{record.error:.2f} %",
                "samples": record.samples,
                "seconds": f"{record.seconds:.1f}",
                "weights": str(facts.get("model") or "unknown"),
                "environment": self.environments.index(environment),
                "href": writers.link(done.path, self.base),
                "file": done.path.name,
            }
        )
        self._places[done.path] = len(self.records) - 1
        return self._places[done.path]


def _value(table: Table, done: RunResult, column: str) -> str:
    """Print what a record adds to a cell; to a mean over classes it adds its own."""
    values = values_of(table.experiment, done)
    metric = table.experiment.metric
    unit = {"error": " %", "seconds": " s a sample", "update": " s an update"}[metric]
    return writers.number(values.get(column, fmean(values.values())), DIGITS[metric]) + unit


def _versions(facts: Mapping[str, Any], more: Sequence[str] = ()) -> str:
    keys = ("ttac", "python", "torch", "numpy", *more)
    return ", ".join(f"{key} {facts[key]}" for key in keys if facts.get(key) is not None)


def render_page(sections: Sequence[Section], out: Path) -> str:
    """Render the page as it stands in the folder `out`."""
    import jinja2

    template = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    ).from_string((files("ttac.benchmark.report") / "page.html").read_text(encoding="utf-8"))
    return template.render(
        columns_of=columns_of,
        describe_group=describe_group,
        difference=difference,
        inline_svg=inline_svg,
        readable=readable,
        writers=writers,
        sections=sections,
        facts=_facts([section.table.experiment for section in sections]),
        details=Details(out),
        compared=any(section.table.compared for section in sections),
        other_scales=writers.OTHER_SCALES if any(writers.of_other_scale(section.table) for section in sections) else "",
        captions=CAPTIONS,
        rules=RULES,
        version=__version__,
    )


def columns_of(table: Table) -> list[str]:
    """Give the columns with the mean first, where a narrow screen shows it."""
    return sorted(table.columns, key=lambda column: column != MEAN)


def difference(cell: Cell, table: Table) -> str:
    """Print how far a number is from the paper's, where both are of the same scale."""
    if cell.published is None or table.experiment.scale != writers.PAPER_SCALE:
        return ""
    return f"{cell.mean - cell.published:+.{table.digits}f}".replace("-", "−")  # noqa: RUF001


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


def _facts(experiments: Sequence[ExperimentResults]) -> list[tuple[str, str]]:
    """Sum up what was run, where and when."""
    done = list({each.path: each for experiment in experiments for each in experiment.done}.values())
    records = [each.record for each in done]
    known = [record.provenance for record in records]
    runs = len({(each.name, each.scale, run) for each in experiments for run in each.runs})  # some are in two tables
    times = sorted(str(facts["time"]) for facts in known if "time" in facts)
    machines = (
        f"{facts.get('processor') or facts.get('platform', 'unknown')}, {facts.get('cpus', '?')} cores, "
        f"{facts.get('threads', '?')} of them used by a run, device {facts.get('device', 'unknown')}"
        for facts in known
    )
    return [
        ("Runs", f"{len(done)} of {runs}, over {writers.plural(len(experiments), 'table')}"),
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
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", body)
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
