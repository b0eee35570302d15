"""`ttac report`: tables, figures and a page from the records of a benchmark."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ttac.benchmark.jobs import ReportJob
from ttac.benchmark.report import writers
from ttac.benchmark.report.figures import draw, render
from ttac.benchmark.report.orders import compare_order
from ttac.benchmark.report.page import CAPTIONS, Section, render_page
from ttac.benchmark.report.published import published_tables
from ttac.benchmark.report.results import EXPERIMENT, ExperimentResults, by_table, load_results
from ttac.benchmark.report.tables import Table, make_table
from ttac.common.files import check_space, replacing
from ttac.common.resumable import alone_in

PAGE, OVERVIEW = "index.html", "README.md"
MARK = "written by ttac report"  # in files that another one of their name could be in the place of


def run_report(job: ReportJob, console: Console) -> None:
    """Write the report; files of it that are there are replaced, and no others."""
    _check_extras()
    experiments, notes = load_results(job.results, job.experiments)
    for note in notes:
        console.print(f"note: {note}", markup=False)
    parts = [part for experiment in sorted(experiments, key=_paper_order) for part in by_table(experiment)]
    tables = [make_table(part, published_tables()) for part in parts]
    _check_out(job.out)
    sections = [Section(table, compare_order(table), _figures(table)) for table in tables]
    files = _files(sections, job.out)  # all of them before the first is written
    check_space(job.out, sum(map(len, files.values())))
    with alone_in(job.out):
        for name, content in files.items():
            with replacing(job.out / name) as draft:
                draft.write_bytes(content if isinstance(content, bytes) else content.encode())
    for table in tables:
        console.print(f"{table.experiment.key}: {writers.counted(table)}", markup=False)
    console.print(f"report: {job.out / PAGE}", markup=False)


def _check_extras() -> None:
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"reports are made with {' and '.join(missing)}: pip install 'ttac[report]'")


def _paper_order(experiment: ExperimentResults) -> tuple[int, str, str]:
    order = list(published_tables())
    first = next((order.index(name) for name in experiment.published if name in order), len(order))
    return first, experiment.name, experiment.scale


def _check_out(out: Path) -> None:
    if (out / EXPERIMENT).exists():
        raise ValueError(f"{out} holds the records of an experiment: choose another --out")
    for name in (PAGE, OVERVIEW):
        if (out / name).exists() and MARK not in (out / name).read_text(encoding="utf-8", errors="replace"):
            raise ValueError(f"{out / name} is of something else: choose another --out")


def _figures(table: Table) -> dict[str, dict[str, bytes]]:
    key, kinds = table.experiment.key, table.experiment.figures
    drawn = {kind: figure for kind in kinds if (figure := draw(kind, table)) is not None}
    return {kind: render(figure, f"{key}-{kind}", ("svg", "png")) for kind, figure in drawn.items()}


def _files(sections: Sequence[Section], out: Path) -> dict[str, str | bytes]:
    """Give the contents of a report's files by their names; the page is the last, which shows the others."""
    files: dict[str, str | bytes] = {}
    for section in sections:
        place = f"tables/{section.table.experiment.key}"
        files[f"{place}.md"] = f"# {_as_markdown(section)}"
        files[f"{place}.csv"] = writers.comma_separated(section.table, out / "tables")
        files[f"{place}.tex"] = writers.latex(section.table)
        for kind, figure in section.figures.items():
            files |= {section.file(kind, suffix): content for suffix, content in figure.items()}
    return {**files, OVERVIEW: overview(sections), PAGE: render_page(sections, out)}


def _as_markdown(section: Section) -> str:
    experiment = section.table.experiment
    title, about = writers.as_text(experiment.title), writers.as_text(experiment.about)
    command, table = " ".join(experiment.command.split()), writers.markdown(section.table, section.ordering)
    return f"{title} (scale {experiment.scale})\n\n{about}\n\n    {command}\n\n{table}"


def overview(sections: Sequence[Section]) -> str:
    """Collect all tables in one Markdown file, with their figures."""
    page = f"[{PAGE}]({PAGE}) has the same with tables that sort, and the records behind each number. "
    page += "Its links to records are relative: move the report and the results together."
    if any(writers.of_other_scale(section.table) for section in sections):
        page += f"\n\n{writers.OTHER_SCALES}"
    parts = [f"<!-- {MARK} -->\n# Results\n\n{page}\n"]
    for section in sections:
        parts.append(f"## {_as_markdown(section)}")
        parts += [f"![{CAPTIONS[kind]}]({section.file(kind, 'png')})\n" for kind in section.figures]
    return "\n".join(parts)
