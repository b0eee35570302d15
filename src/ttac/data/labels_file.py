"""Labels of image files, from a CSV file."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ttac.common.cells import original
from ttac.common.lookup import some


def read_labels(path: Path, files: Sequence[str], num_classes: int, classes: Sequence[str] | None) -> dict[str, int]:
    """Read the label of each of `files` from columns `file` and `label`; other files and columns may be there.

    A label is the name of a class, or its number.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "labels.csv"
    ...     _ = path.write_text("file,label\\na.png,dog\\nb.png,0\\n")
    ...     read_labels(path, ["a.png", "b.png"], 2, ["cat", "dog"])
    {'a.png': 1, 'b.png': 0}
    """
    if not path.is_file():
        raise FileNotFoundError(f"no labels file {path}")
    numbers, wanted, found = _numbers(num_classes, classes or ()), set(files), dict[str, int]()
    for line, name, label in _rows(path):
        if name not in wanted:
            continue
        if label not in numbers:
            known = f"names are {some(classes, 5)}; " if classes else ""
            raise ValueError(f"{path}, line {line}: no class {label!a} ({known}numbers are 0 to {num_classes - 1})")
        if found.setdefault(name, numbers[label]) != numbers[label]:
            raise ValueError(f"{path}, line {line}: {name!a} has two labels")
    missing = [name for name in files if name not in found]
    if missing:
        shown = some([ascii(name) for name in missing], 3)
        raise ValueError(f"{path} has no label for {len(missing)} of {len(files)} images: {shown}")
    return found


def _rows(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, file and label of each row, as `csv_line` writes them; names need not be UTF-8."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:  # Excel writes a mark first
        table = csv.DictReader(file)
        try:
            if not {"file", "label"} <= set(table.fieldnames or ()):
                raise ValueError(f"{path} must begin with the line file,label")
            for row in table:
                yield table.line_num, original(row["file"] or ""), original((row["label"] or "").strip())
        except csv.Error as error:
            raise ValueError(f"{path}, line {table.line_num} is no CSV: {error}") from error


def _numbers(num_classes: int, classes: Sequence[str]) -> dict[str, int]:
    """Number what a label may be; a name that looks like a number is a name, and one of two classes says nothing."""
    counts = Counter(classes)
    numbers = {str(number): number for number in range(num_classes) if str(number) not in counts}
    return numbers | {name: number for number, name in enumerate(classes) if counts[name] == 1}
