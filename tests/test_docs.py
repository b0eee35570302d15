"""What the pages show runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["adapt.md", "data.md", "streams.md"])
def test_the_examples_of_a_page_run(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)


@pytest.mark.parametrize("page", [*sorted(path.name for path in DOCS.glob("*.md")), "../README.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = DOCS / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target
