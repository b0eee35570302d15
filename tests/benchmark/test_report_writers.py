"""Markdown, CSV and LaTeX say what the table says, whatever texts the records bring."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from report_helpers import made_up, place, write_failure, write_results

from ttac.benchmark.report.orders import Ordering, Place, compare_order
from ttac.benchmark.report.published import published_tables
from ttac.benchmark.report.results import load_results
from ttac.benchmark.report.tables import Table, make_table
from ttac.benchmark.report.writers import as_text, comma_separated, latex, legend, markdown, swap_lines

NOTHING = Ordering(0, 0, ())
HOSTILE = "<img src=x onerror=alert(1)> | a_b **c** $\\x$ #1 & 50% ~^{}\n=1+1"


def protocols(root: Path) -> Table:
    runs = []
    for row, errors in (("BN", (24.0, 25.0)), ("TENT", (22.0, 23.0))):
        for seed, error in enumerate(errors):
            run = place("N-O-SF", row, "C10-C", seed)
            runs.append((run, made_up(run, error)))
    write_results(root, "protocols", runs, published=["protocols"])
    return table_of(root)


def table_of(root: Path) -> Table:
    (experiment,), _ = load_results(root)
    return make_table(experiment, published_tables())


def hostile(root: Path) -> Table:
    runs = [(run, made_up(run)) for run in (place("N-O-SF", HOSTILE, "fog\\_|"), place("N-O-SF", "=1+1", "fog\\_|"))]
    for index, (run, _) in enumerate(runs):
        run["name"] = f"run, {index} <b>"
    failed = place("N-O-SF", HOSTILE, "fog\\_|", 1, name="failed")
    folder = write_results(root, "hostile", [*runs, (failed, None)], title=HOSTILE, about=HOSTILE)
    write_failure(folder, failed, f"ValueError: {HOSTILE}")
    return table_of(root)


def md_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_markdown_has_mean_spread_n_the_best_in_bold_and_the_paper(tmp_path: Path) -> None:
    text = markdown(protocols(tmp_path), NOTHING)
    assert md_rows(text) == [
        ["protocol", "method", "C10-C", "n"],
        ["---", "---", "---:", "---:"],
        ["N-O-SF", "BN", "24.50 ± 0.71 (15.49)", "2"],
        ["N-O-SF", "TENT", "**22.50 ± 0.71** (14.27)", "2"],
    ]
    assert text.startswith("4 of 4 runs. ")
    assert "sample standard deviation over n seeds" in text


def test_markdown_tells_partial_means_missing_and_failed_runs(tmp_path: Path) -> None:
    runs = [place("N-O-SF", row, "C10-C", 0, domain) for row in ("BN", "TENT") for domain in ("fog", "snow")]
    records = [(run, made_up(run) if index < 3 else None) for index, run in enumerate(runs)]
    folder = write_results(tmp_path, "protocols", records)
    write_failure(folder, runs[3], "ValueError: not finite\nand more")
    text = markdown(table_of(tmp_path), NOTHING)
    assert text.startswith("3 of 4 runs, 1 failed. ")
    assert md_rows(text)[2:] == [["N-O-SF", "BN", "20.00", "1"], ["N-O-SF", "TENT", r"20.00\*", "1"]]
    assert r"Numbers with \* are means over a part" in text
    assert "ValueError: not finite" in text


def test_markdown_lists_what_is_in_another_order(tmp_path: Path) -> None:
    runs = [(run, made_up(run, error)) for row, error in (("BN", 12.0), ("TTAC++", 40.0))
            for run in [place("N-O-SF", row, "C10-C")]]  # fmt: skip
    write_results(tmp_path, "protocols", runs, published=["protocols"])
    table = table_of(tmp_path)
    text = markdown(table, compare_order(table))
    assert "Of 1 pair that the paper tells apart, 0 stand in the same order, 0 are undecided and 1 is swapped." in text
    swap = "- N-O-SF, C10-C: BN (12.00) is ahead of TTAC++ (40.00); in the paper TTAC++ (11.62) is ahead of BN (15.49)."
    assert swap in text.splitlines()
    assert "0.1 points apart" in text, "the rule is stated"


def test_texts_of_records_are_no_markdown_and_no_html(tmp_path: Path) -> None:
    text = markdown(hostile(tmp_path), NOTHING)
    rows = md_rows(text)
    assert {len(row) for row in rows} == {4}, "a bar in a name makes no cell"
    assert re.sub(r"\\(.)", r"\1", rows[2][1]) == " ".join(HOSTILE.split())
    assert not re.search(r"(?<!\\)<", text)
    assert as_text("a\n# b") == r"a \# b"


def test_csv_has_a_row_for_every_cell(tmp_path: Path) -> None:
    table = protocols(tmp_path)
    rows = list(csv.DictReader(io.StringIO(comma_separated(table, tmp_path / "report" / "tables"))))
    assert [row["row"] for row in rows] == ["BN", "TENT"]
    first = rows[0]
    assert (float(first["mean"]), int(first["n"]), float(first["published"])) == (24.5, 2, 15.49)
    assert float(first["std"]) == pytest.approx(0.5**0.5)
    assert [row["best"] for row in rows] == ["0", "1"]
    records = [(tmp_path / "report" / "tables" / path).resolve() for path in first["records"].split(" ")]
    assert records == [
        (tmp_path / "protocols" / "tiny" / f"N-O-SF-BN-C10-C-fog-{seed}.json").resolve() for seed in (0, 1)
    ]


def test_csv_has_texts_and_no_formulas(tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(comma_separated(hostile(tmp_path), tmp_path))))
    assert [row["row"] for row in rows] == [HOSTILE, "'=1+1"]
    assert rows[0]["column"] == "fog\\_|"
    assert rows[0]["records"] == "hostile/tiny/run%2C%200%20%3Cb%3E.json"


def check_latex(text: str) -> list[list[str]]:
    """Find what TeX would stumble over, and give the cells of the rows."""
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    bare = re.sub(r"\\[\\&%$#_{}]", "", body)  # without escaped characters and line ends
    depth = 0
    for mark in bare:
        depth += (mark == "{") - (mark == "}")
        assert depth >= 0, "a brace closes that was not open"
    assert depth == 0, "a brace stays open"
    begun = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", body):
        if kind == "begin":
            begun.append(name)
        else:
            assert begun.pop() == name
    assert not begun
    outside = re.sub(r"\$(n|\\pm|\^\{\*\})\$", "", bare)
    assert not re.search(r"[%#_~^$<>|]", outside.replace(r"\label{tab:", "")), "a character that is not escaped"
    commands = {"begin", "end", "centering", "caption", "label", "toprule", "midrule", "bottomrule", "textbf", "pm",
                "textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater", "textbar"}  # fmt: skip
    assert set(re.findall(r"\\([a-zA-Z]+)", bare)) <= commands
    rows = [line.removesuffix(r"\\") for line in body.splitlines() if line.endswith(r"\\")]
    cells = [re.split(r"(?<!\\)&", row) for row in rows]
    columns = re.search(r"\\begin\{tabular\}\{(\w+)\}", body)
    assert columns is not None
    assert {len(row) for row in cells} == {len(columns[1])}
    return [[cell.strip() for cell in row] for row in cells]


def test_latex_is_whole_and_has_the_same_numbers(tmp_path: Path) -> None:
    text = latex(protocols(tmp_path))
    assert check_latex(text) == [
        ["Protocol", "Method", "C10-C", "$n$"],
        ["N-O-SF", "BN", r"24.50 $\pm$ 0.71 (15.49)", "2"],
        ["N-O-SF", "TENT", r"\textbf{22.50} $\pm$ 0.71 (14.27)", "2"],
    ]
    assert r"\usepackage{booktabs}" in text
    assert r"Error (\%)" in text


def test_latex_escapes_texts_of_records(tmp_path: Path) -> None:
    rows = check_latex(latex(hostile(tmp_path)))
    assert rows[1][1].startswith(r"\textless{}img src=x onerror=alert(1)\textgreater{} \textbar{} a\_b **c** \$")


def test_the_checker_of_latex_finds_mistakes() -> None:
    good = "\\begin{tabular}{ll}\na & b \\\\\n\\end{tabular}\n"
    assert check_latex(good) == [["a", "b"]]
    for bad in (
        good.replace("a &", "a_1 &"),
        good.replace("b", "b & c"),
        good.replace("a", "{a"),
        good.replace("b", r"\x"),
    ):
        with pytest.raises(AssertionError):
            check_latex(bad)


def order(root: Path, scale: str = "tiny") -> Table:
    """Give a table like the paper's of orders, of which each column has a seed of its own."""
    runs = []
    for column in published_tables()["order"].columns:
        run = place("N-O-SL", "TTAC++", column, int(column))
        runs.append((run, made_up(run, 9.0)))
    write_results(root, "order", runs, scale, average=True, published=["order"])
    return table_of(root)


def test_published_numbers_have_their_place_and_spread(tmp_path: Path) -> None:
    table = order(tmp_path)
    (row,) = published_tables()["order"].rows
    md, tex = markdown(table, NOTHING), latex(table)
    assert f"({row.average:.2f} ± {row.spread:.2f})" in md
    assert rf"({row.average:.2f} $\pm$ {row.spread:.2f})" in tex
    check_latex(tex)
    assert r"Published: Table 11, tab:stream\_order." in md
    assert r"Published: Table 11, tab:stream\_order." in tex
    assert published_tables()["order"].note[:30] in md
    assert "(of the mean: over n = 10 columns)" in md


@pytest.mark.parametrize(("scale", "warned"), [("tiny", True), ("paper", False)])
def test_numbers_of_other_scales_are_said_not_to_compare(tmp_path: Path, scale: str, warned: bool) -> None:
    table = order(tmp_path, scale)
    for text in (markdown(table, NOTHING), latex(table)):
        assert ("compare orders within a protocol, not values." in text) == warned
    assert "in brackets what the paper has" in legend(table)


def test_nothing_is_said_of_the_paper_where_no_number_is_compared(tmp_path: Path) -> None:
    run = place("N-O-SF", "A variant", "C10-C")
    write_results(tmp_path, "protocols", [(run, made_up(run))], published=["protocols"])
    table = table_of(tmp_path)
    for text in (markdown(table, NOTHING), latex(table)):
        assert not re.search("paper|Published", text)
    assert markdown(table, NOTHING).startswith("1 of 1 run. ")


def test_swaps_are_told_with_all_four_numbers(tmp_path: Path) -> None:
    table = protocols(tmp_path)
    bn, tent = (Place(row, row.cells["C10-C"], row.cells["C10-C"].published or 0.0) for row in table.rows)
    assert swap_lines(table, Ordering(0, 0, (("C10-C", bn, tent),))) == [
        "N-O-SF, C10-C: BN (24.50) is ahead of TENT (22.50); in the paper TENT (14.27) is ahead of BN (15.49)."
    ]
