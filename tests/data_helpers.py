"""What tests of data sets share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ttac.data.labelled import LabelledImages
from ttac.data.sets import find_data


def read_data(data: str, *, root: Path | None = None, split: str | None = None, **part: Any) -> LabelledImages:
    """Find data and read a part of them."""
    return find_data(data, root).read(split, **part)
