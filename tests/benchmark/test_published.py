"""The paper's tables in the package: whole, with the averages that the paper prints, and alike where they overlap."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal
from importlib.resources import files

import numpy as np
import pytest

from ttac.benchmark.report.published import PublishedRow, PublishedTable, published_tables
from ttac.data.corruptions import CORRUPTIONS
from ttac.data.sets.specs import get_spec
from ttac.evaluation.protocols import PROTOCOLS
from ttac.methods.registry import methods

TABLES = published_tables()
SHAPES = {  # place, rows, columns, printed averages, printed spreads
    "protocols": ("Table 3, tab:categorization_table", 27, 3, 0, 0),
    "imagenet-c": ("Table 4, tab:ImageNet", 9, 15, 9, 0),
    "visda": ("Table 5, tab:visda", 21, 12, 21, 0),
    "adversarial": ("Table 6, tab:AdversarialSample", 23, 10, 23, 0),
    "ablation": ("Table 7, tab:ablation", 17, 1, 0, 0),
    "vit": ("Table 8, tab:ViT", 7, 15, 7, 7),
    "queue": ("Table 9, tab:QueueAccuracyAnalysis", 5, 5, 0, 0),
    "queue-imagenet": ("Table 9, tab:QueueAccuracyAnalysis", 5, 3, 0, 0),
    "time": ("Table 10, tab:QueueTimeAnalysis", 6, 5, 0, 0),
    "order": ("Table 11, tab:stream_order", 1, 10, 1, 1),
    "clusters": ("Table 12, tab:target_clust_update", 3, 15, 3, 0),
    "thresholds": ("Table 13, tab:Thresholds", 6, 6, 0, 0),
    "inference": ("Table 14, tab:estimated_source_distribution", 2, 1, 0, 0),
    "levels": ("Table 15, tab:CorruptLevel", 5, 5, 0, 0),
}
OF_VARIANTS = ("ablation", "clusters", "thresholds", "inference")
ROWS = [(table, row) for table in TABLES.values() for row in table.rows]
ANCHORED = "anchored clustering + filtering + global alignment"


def cents(value: float | Decimal) -> Decimal:
    """Round half up, as the paper does: 40.395 is printed as 40.40."""
    return Decimal(str(value)).quantize(Decimal("0.01"), ROUND_HALF_UP)


def numbers(row: PublishedRow) -> list[float]:
    return [value for value in row.values if value is not None]


def test_all_tables_are_there_in_the_papers_order() -> None:
    assert list(TABLES) == list(SHAPES)
    assert len({table.title for table in TABLES.values()}) == len(TABLES)
    assert len(list((files("ttac.benchmark.report") / "published").iterdir())) == len(TABLES)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_has_its_place_and_its_shape(table: PublishedTable) -> None:
    averages = sum(row.average is not None for row in table.rows)
    spreads = sum(row.spread is not None for row in table.rows)
    assert (table.place, len(table.rows), len(table.columns), averages, spreads) == SHAPES[table.name]
    assert table.title
    assert table.note
    assert table.metric == ("seconds" if table.name == "time" else "error")
    assert all(len(numbers(row)) == len(table.columns) for row in table.rows)  # the paper has no empty cells
    assert len({(row.group, row.row) for row in table.rows}) == len(table.rows)
    assert {row.group for row in table.rows} <= {*PROTOCOLS, "-"}
    assert len({*table.columns, "mean"}) == len(table.columns) + 1
    assert re.fullmatch(r"Table [1-9]\d*, tab:\w+", table.place)
    texts = (*table.columns, *(text for row in table.rows for text in (row.group, row.row)))
    assert all(text and text == text.strip() for text in texts)
    largest = {"error": 100, "seconds": 1}[table.metric]
    printed = [value for row in table.rows for value in (*row.values, row.average, row.spread) if value is not None]
    assert all(type(value) in (int, float) and 0 <= value <= largest for value in printed)
    assert all((row.group == "-") == (row.row in ("TEST", "nothing")) for row in table.rows)


@pytest.mark.parametrize("name", [name for name in TABLES if name not in OF_VARIANTS])
def test_rows_are_methods_under_protocols_that_they_run_under(name: str) -> None:
    known = {method.capabilities.title: method.capabilities.protocols for method in methods().values()}
    for row in TABLES[name].rows:
        assert row.row in known
        assert row.group == "-" or row.group in known[row.row]


def test_columns_have_the_names_of_the_package() -> None:
    for name in ("imagenet-c", "vit", "clusters"):
        assert TABLES[name].columns == tuple(sorted(CORRUPTIONS))  # the paper's order is the alphabet's
    assert TABLES["visda"].columns == get_spec("visda-c").classes
    assert TABLES["adversarial"].columns == get_spec("cifar10").classes


def test_printed_averages_follow_from_the_values() -> None:
    wrong = {}
    for table, row in ROWS:
        if row.average is not None:
            exact = sum(map(Decimal, map(str, row.values)), Decimal(0)) / len(row.values)
            if cents(exact) != cents(row.average):
                wrong[table.name, row.group, row.row] = (row.average, float(cents(exact)))
    assert wrong == {}, "printed and computed: a slip in a transcribed value shows up here"


def test_printed_spreads_are_the_populations_standard_deviation() -> None:
    printed = [row for _, row in ROWS if row.spread is not None]
    for row in printed:
        assert cents(float(np.std(numbers(row)))) == cents(row.spread or 0)
    samples = [cents(float(np.std(numbers(row), ddof=1))) == cents(row.spread or 0) for row in printed]
    assert len(samples) == 8
    assert not any(samples)


@pytest.mark.parametrize(
    ("name", "group", "row", "column", "value"),
    [
        ("protocols", "-", "TEST", "C100-C", 60.34),
        ("protocols", "N-O-SF", "Conjugate PL", "C10-C", 13.21),
        ("protocols", "N-M-SL", "TTAC+SHOT", "C10.1", 11.30),
        ("protocols", "Y-M-SL", "TTT-R", "C100-C", 40.40),
        ("imagenet-c", "N-O-SF", "Self-Training", "glass_blur", 91.93),
        ("imagenet-c", "N-O-SL", "TTAC", "mean", 50.11),
        ("visda", "N-M-SF", "AdaContrast", "skateboard", 87.46),
        ("visda", "Y-M-SL", "TTAC++", "knife", 2.89),
        ("adversarial", "N-O-SF", "TENT", "ship", 90.50),
        ("adversarial", "N-M-SL", "TTAC++", "mean", 12.55),
        ("ablation", "N-O-SL", "pseudo label filtering", "C10-C", 15.00),
        ("ablation", "N-M-SL", "global alignment (KLD)", "C10-C", 10.80),
        ("vit", "N-O-SF", "TENT", "impulse_noise", 61.12),
        ("queue", "N-O-SF", "SHOT", "no queue", 15.18),
        ("queue-imagenet", "N-O-SL", "TTAC", "queue, 1 pass", 45.44),
        ("time", "-", "TEST", "queue, 4 passes", 0.0030),
        ("time", "N-O-SL", "TTAC++", "queue, 3 passes", 0.1591),
        ("order", "N-O-SL", "TTAC++", "500000", 8.68),
        ("clusters", "N-O-SL", "soft assignment", "contrast", 6.52),
        ("thresholds", "N-O-SL", "tau_TC -0.001", "tau_PP 0.9", 19.42),
        ("thresholds", "N-O-SL", "tau_TC -1.0", "tau_PP 0.5", 30.75),
        ("inference", "N-O-SF", "classifier weights", "C10-C", 13.79),
        ("levels", "-", "TEST", "level 2", 18.34),
        ("levels", "N-O-SF", "TENT", "level 5", 13.93),  # 13.87 in `queue`: the paper does not agree with itself
        ("levels", "N-O-SF", "SHOT", "level 5", 13.76),  # 13.75 in `queue`
        ("protocols", "N-O-SL", "BN", "C10-C", None),
        ("protocols", "N-O-SF", "BN", "C10-P", None),
        ("protocols", "N-O-SF", "BN", "mean", None),
    ],
)
def test_spot_values(name: str, group: str, row: str, column: str, value: float | None) -> None:
    assert TABLES[name].value(group, row, column) == value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ablation", "-", "nothing", "C10-C"), ("protocols", "-", "TEST", "C10-C")),
        (("ablation", "N-M-SL", "global alignment (L2)", "C10-C"), ("protocols", "N-M-SL", "TTT++", "C10-C")),
        *(
            (("ablation", group, ANCHORED + more, "C10-C"), ("protocols", group, method, "C10-C"))
            for group in ("N-O-SL", "Y-O-SL", "N-M-SL", "Y-M-SL")
            for more, method in (("", "TTAC"), (" + self-training", "TTAC++"))
        ),
        (("inference", "N-O-SF", "learned means (TTAC++)", "C10-C"), ("protocols", "N-O-SF", "TTAC++", "C10-C")),
        (("clusters", "N-O-SL", "filtering", "mean"), ("protocols", "N-O-SL", "TTAC++", "C10-C")),
        (("clusters", "N-O-SL", "filtering", "snow"), ("queue", "N-O-SL", "TTAC++", "queue, 4 passes")),
        (("clusters", "N-O-SL", "filtering", "snow"), ("order", "N-O-SL", "TTAC++", "0")),
        *(
            (("levels", "N-O-SL", row, "level 5"), ("queue", "N-O-SL", row, "queue, 4 passes"))
            for row in ("TTAC", "TTAC++")
        ),
        *(
            (("imagenet-c", group, row, "snow"), ("queue-imagenet", group, row, "queue, 2 passes"))
            for group, row in (
                ("N-O-SF", "BN"),
                ("N-O-SF", "TENT"),
                ("N-O-SF", "SHOT"),
                ("N-O-SL", "TTAC"),
                ("N-O-SL", "TTAC++"),
            )
        ),
    ],
)
def test_tables_agree_where_they_overlap(one: tuple[str, str, str, str], other: tuple[str, str, str, str]) -> None:
    value = TABLES[one[0]].value(*one[1:])
    assert value is not None
    assert value == TABLES[other[0]].value(*other[1:])
