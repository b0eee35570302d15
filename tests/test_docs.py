"""What the pages show runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["adapt.md", "data.md", "streams.md"])
def test_the_examples_of_a_page_run(page: str) -> None:
    blocks = examples(page)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)


@pytest.mark.usefixtures("untrained")
def test_the_examples_of_your_own_model_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in examples("own-model.md"):
        exec(block, names)


@pytest.mark.usefixtures("untrained")
def test_the_first_lines_of_the_readme_run_as_they_stand() -> None:
    names: dict[str, object] = {}
    exec(examples("../README.md")[0], names)
    assert names["logits"].shape == (8, 10)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", [*sorted(path.name for path in DOCS.glob("*.md")), "../README.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = DOCS / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target
