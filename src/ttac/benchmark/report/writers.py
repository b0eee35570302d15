"""Tables as Markdown, CSV and LaTeX."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

from ttac.benchmark.report.orders import RULES, Ordering
from ttac.benchmark.report.tables import Cell, Table, as_range, readable
from ttac.common.cells import csv_line

PAPER_SCALE = "paper"  # the one at which values may be compared with the paper's
OTHER_SCALES = (
    "The paper's numbers are of larger models, other data or longer streams: compare orders within a protocol, "
    "not values."
)
CSV_FIELDS = (
    "experiment", "scale", "group", "row", "column", "metric",
    "mean", "std", "n", "over", "partial", "best", "published", "published_std", "records",
)  # fmt: skip


def number(value: float, digits: int, spread: float | None = None) -> str:
    """Print a number with fixed decimal places, and its standard deviation where it has one.

    >>> number(12.345, 2), number(12.345, 1, 0.5)
    ('12.35', '12.3 ± 0.5')
    """
    return f"{value:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def plural(count: int, noun: str) -> str:
    """Count things.

    >>> plural(1, "record"), plural(0, "record")
    ('1 record', '0 records')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def paper_number(cell: Cell, digits: int) -> str:
    """Print what the paper has in the place of a cell, an empty text where it has nothing."""
    return "" if cell.published is None else number(cell.published, digits, cell.published_std)


def link(path: Path, base: Path) -> str:
    """Give the address of a file as seen from the folder `base`."""
    return quote(Path(os.path.relpath(path.resolve(), base.resolve())).as_posix())


def counted(table: Table) -> str:
    """Say how many runs a table is of."""
    experiment = table.experiment
    failed = f", {len(experiment.failed)} failed" if experiment.failed else ""
    return f"{len(experiment.done)} of {plural(len(experiment.runs), 'run')}{failed}"


def of_other_scale(table: Table) -> bool:
    """Tell whether a table has numbers of the paper beside values that are of something smaller."""
    return table.compared and table.experiment.scale != PAPER_SCALE


def legend(table: Table, published: str = "in brackets") -> str:
    """Explain the numbers of a table in a few sentences; `published` says where the paper's stand."""
    cells = [cell for row in table.rows for cell in row.cells.values()]
    said = [f"{table.unit[0].upper()}{table.unit[1:]}, mean"]
    if any(cell.std is not None for cell in cells):
        said[0] += " ± sample standard deviation over n seeds"
    columns = [cell.n for cell in cells if cell.over == "columns"]
    if columns:
        said[0] += f" (of the mean: over n = {as_range(columns)} columns)"
    said[0] += "; lower is better"
    if any(cell.best for cell in cells):
        said[0] += ", the best of a protocol in bold"
    said[0] += f"; {published} what the paper has." if table.compared else "."
    if of_other_scale(table):
        said.append(OTHER_SCALES)
    if not all(cell.whole for cell in cells):
        said.append("Numbers with * are means over a part of the domains or columns: not compared, nor in figures.")
    return " ".join(said)


def places_in_paper(table: Table) -> list[str]:
    """Say where the published numbers of a table stand, and what is to know of them."""
    return [f"Published: {source.place}. {source.note}".strip() for source in table.sources if table.compared]


def order_sentence(ordering: Ordering) -> str:
    """Sum up how the order of methods compares with the paper's.

    >>> order_sentence(Ordering(3, 1, ()))
    'Of 4 pairs that the paper tells apart, 3 stand in the same order, 1 is undecided and none is swapped.'
    """
    swapped = len(ordering.swaps)
    pairs = "pair" if ordering.compared == 1 else "pairs"
    return (
        f"Of {ordering.compared} {pairs} that the paper tells apart, {ordering.same} "
        f"{'stands' if ordering.same == 1 else 'stand'} in the same order, {ordering.undecided} "
        f"{'is' if ordering.undecided == 1 else 'are'} undecided and {swapped or 'none'} "
        f"{'is' if swapped <= 1 else 'are'} swapped."
    )


def swap_lines(table: Table, ordering: Ordering) -> list[str]:
    """Say of each swapped pair what is measured and what is published."""
    lines = []
    for column, ahead, behind in ordering.swaps:
        here, there = (number(place.cell.mean, table.digits) for place in (ahead, behind))
        paper_here, paper_there = (number(place.published, table.digits) for place in (ahead, behind))
        lines.append(
            f"{ahead.row.group}, {column}: {ahead.row.title} ({here}) is ahead of {behind.row.title} ({there}); "
            f"in the paper {behind.row.title} ({paper_there}) is ahead of {ahead.row.title} ({paper_here})."
        )
    return lines


def markdown(table: Table, ordering: Ordering) -> str:
    """Write a table as Markdown, with its legend and what is in another order than in the paper."""
    experiment = table.experiment
    lines = [f"{counted(table)}. {as_text(legend(table))}", ""]
    lines.append("| " + " | ".join(map(as_text, ("protocol", "method", *map(readable, table.columns), "n"))) + " |")
    lines.append("|---|---|" + "---:|" * (len(table.columns) + 1))
    for row in table.rows:
        cells = [_md_cell(row.cells.get(column), table.digits) for column in table.columns]
        lines.append("| " + " | ".join([as_text(row.group), as_text(row.title), *cells, row.seeds]) + " |")
    for place in places_in_paper(table):
        lines += ["", as_text(place)]
    if ordering.compared:
        lines += ["", f"{order_sentence(ordering)} {RULES[experiment.metric]}", ""]
        lines += [f"- {as_text(line)}" for line in swap_lines(table, ordering)]
    for failure in experiment.failed:
        lines += ["", f"Failed: {as_text(failure.run.name)}: {as_text(failure.first_line)}"]
    return "\n".join(lines).rstrip() + "\n"


def as_text(text: str) -> str:
    """Keep a text from being read as Markdown or HTML."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_{}\[\]<>|~#!&])", r"\\\1", flat)


def _md_cell(cell: Cell | None, digits: int) -> str:
    if cell is None:
        return ""
    text = number(cell.mean, digits, cell.std)
    text = f"**{text}**" if cell.best else text
    text += "" if cell.whole else r"\*"
    paper = paper_number(cell, digits)
    return f"{text} ({paper})" if paper else text


def comma_separated(table: Table, base: Path) -> str:
    """Write a table as CSV, one row a cell; `records` are addresses seen from `base`, with spaces between them."""
    lines = [csv_line(*CSV_FIELDS)]
    experiment = table.experiment
    for row in table.rows:
        for column, cell in row.cells.items():
            lines.append(
                csv_line(
                    experiment.name, experiment.scale, row.group, row.title, column, experiment.metric,
                    cell.mean, cell.std, cell.n, cell.over, cell.lacking, int(cell.best),
                    cell.published, cell.published_std, " ".join(link(done.path, base) for done in cell.done),
                )
            )  # fmt: skip
    return "".join(lines)


_TEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}  # fmt: skip


def _tex(text: str) -> str:
    """Keep a text from being read as TeX.

    >>> _tex("50 % of a_b")
    '50 \\\\% of a\\\\_b'
    """
    return "".join(_TEX.get(mark, mark) for mark in " ".join(text.split()))


def latex(table: Table) -> str:
    """Write a table as LaTeX, for the package booktabs."""
    experiment = table.experiment
    width = len(table.columns)
    said = [f"{experiment.title} (scale {experiment.scale}, {counted(table)}).", legend(table), *places_in_paper(table)]
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_tex(' '.join(said))}}}",
        rf"\label{{tab:{experiment.key}}}",
        rf"\begin{{tabular}}{{ll{'r' * (width + 1)}}}",
        r"\toprule",
        " & ".join(["Protocol", "Method", *(_tex(readable(column)) for column in table.columns), "$n$"]) + r" \\",
    ]
    for group in table.groups:
        lines.append(r"\midrule")
        for row in table.of(group):
            cells = [_tex_cell(row.cells.get(column), table.digits) for column in table.columns]
            lines.append(" & ".join([_tex(group), _tex(row.title), *cells, row.seeds]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _tex_cell(cell: Cell | None, digits: int) -> str:
    if cell is None:
        return ""
    text = number(cell.mean, digits)
    text = rf"\textbf{{{text}}}" if cell.best else text
    text += "" if cell.std is None else rf" $\pm$ {number(cell.std, digits)}"
    text += "" if cell.whole else r"$^{*}$"
    paper = paper_number(cell, digits).replace("±", r"$\pm$")
    return f"{text} ({paper})" if paper else text
