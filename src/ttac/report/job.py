"""`ttac report`: tables, figures and a page from the records of a benchmark."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ttac.files import replacing
from ttac.jobs import alone_in
from ttac.report.figures import draw
from ttac.report.orders import compare_order
from ttac.report.page import CAPTIONS, Section, render_page
from ttac.report.plots import close, save_figure
from ttac.report.published import published_tables
from ttac.report.results import EXPERIMENT, Experiment, load_results
from ttac.report.tables import Table, make_table
from ttac.report.writers import as_text, comma_separated, latex, markdown

PAGE, OVERVIEW = "index.html", "README.md"
MARK = "written by ttac report"  # in files that another one of their name could be in the place of


@dataclass(frozen=True)
class ReportJob:
    """Where the results are, and where the report goes."""

    results: Path
    out: Path
    experiments: tuple[str, ...] = ()  # all, if empty


def run_report(job: ReportJob, console: Console) -> None:
    """Write the report; files of it that are there are replaced, and no others."""
    _check_extras()
    experiments, notes = load_results(job.results, job.experiments)
    for note in notes:
        console.print(f"note: {note}", markup=False)
    tables = [make_table(experiment, published_tables()) for experiment in sorted(experiments, key=_paper_order)]
    _check_out(job.out)
    with alone_in(job.out):
        sections = [_write_section(table, job.out) for table in tables]
        _write(job.out / OVERVIEW, overview(sections))
        _write(job.out / PAGE, render_page(sections, job.out))
    for section in sections:
        experiment = section.table.experiment
        lacking = "" if experiment.complete else f" of {len(experiment.runs)}"
        failed = f", {len(experiment.failed)} failed" if experiment.failed else ""
        console.print(f"{experiment.key}: {len(experiment.done)}{lacking} runs{failed}", markup=False)
    console.print(f"report: {job.out / PAGE}", markup=False)


def _check_extras() -> None:
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"reports are made with {' and '.join(missing)}: pip install 'ttac[report]'")


def _paper_order(experiment: Experiment) -> tuple[int, str, str]:
    order = list(published_tables())
    first = next((order.index(name) for name in experiment.published if name in order), len(order))
    return first, experiment.name, experiment.scale


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    if (out / EXPERIMENT).exists():
        raise ValueError(f"{out} holds the records of an experiment: choose another --out")
    for name in (PAGE, OVERVIEW):
        if (out / name).exists() and MARK not in (out / name).read_text(encoding="utf-8", errors="replace"):
            raise ValueError(f"{out / name} is of something else: choose another --out")


def _write_section(table: Table, out: Path) -> Section:
    experiment = table.experiment
    figures = {}
    for kind in experiment.figures:
        figure = draw(kind, table)
        if figure is None:
            continue
        path = out / "figures" / f"{experiment.key}-{kind}.svg"
        for suffix in (".svg", ".png"):
            save_figure(figure, path.with_suffix(suffix))
        close(figure)
        figures[kind] = path
    section = Section(table, compare_order(table), figures)
    place = out / "tables" / experiment.key
    _write(Path(f"{place}.md"), f"# {_title(experiment)}\n\n{_about(experiment)}{markdown(table, section.ordering)}")
    _write(Path(f"{place}.csv"), comma_separated(table, place.parent))
    _write(Path(f"{place}.tex"), latex(table))
    return section


def _title(experiment: Experiment) -> str:
    return f"{as_text(experiment.title)} (scale {experiment.scale})"


def _about(experiment: Experiment) -> str:
    return f"{as_text(experiment.about)}\n\n    {' '.join(experiment.command.split())}\n\n"


def overview(sections: Sequence[Section]) -> str:
    """Collect all tables in one Markdown file, with their figures."""
    page = f"[{PAGE}]({PAGE}) has the same with tables that sort, and the records behind each number."
    parts = [f"<!-- {MARK} -->\n# Results\n\n{page}\n"]
    for section in sections:
        experiment = section.table.experiment
        parts.append(f"## {_title(experiment)}\n\n{_about(experiment)}{markdown(section.table, section.ordering)}")
        parts += [f"![{CAPTIONS[kind]}](figures/{path.stem}.png)\n" for kind, path in section.figures.items()]
    return "\n".join(parts)


def _write(path: Path, text: str) -> None:
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
