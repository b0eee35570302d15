"""Error of a source model under all nineteen corruptions at all severities, without adaptation, as a table.

    ttac evaluate --model BUNDLE --data cifar10-jpg --corruption all --severity 1 2 3 4 5 --scenario continual \\
        --method test --samples 2000 --out results/severities/test.json
    python benchmarks/severities.py

The record takes eight minutes on one core; the table is made from it.
"""

from __future__ import annotations

from pathlib import Path

from jsonargparse import auto_cli

import ttac
from ttac.data.corruptions import CORRUPTIONS, EXTRA
from ttac.data.corruptions.constants import SEVERITIES

NAMES = (*CORRUPTIONS, *EXTRA)
FOLDER = Path(__file__).parents[1] / "results" / "severities"


def main(record: Path = FOLDER / "test.json", out: Path = FOLDER / "README.md") -> None:
    """Lay the errors of a record out, one row a corruption.

    Args:
        record: of `ttac evaluate` over all corruptions and severities.
        out: Markdown file.
    """
    found = ttac.Record.load(record)
    rows = [f"| error (%) | {' | '.join(f'severity {level}' for level in SEVERITIES)} |", "|---" * 6 + "|"]
    errors = {name: [found.domain_error[f"{name} {level}"]["error"] for level in SEVERITIES] for name in NAMES}
    errors["mean of the fifteen"] = [
        sum(column) / len(CORRUPTIONS) for column in zip(*(errors[name] for name in CORRUPTIONS), strict=True)
    ]
    rows += [f"| {name} | {' | '.join(f'{error:.1f}' for error in by_level)} |" for name, by_level in errors.items()]
    samples = found.domain_error[f"{NAMES[0]} 5"]["samples"]
    title = f"# cifar10-jpg, {found.provenance['method']}, {samples:.0f} images each"
    out.write_text(f"{title}\n\n`{found.provenance['command']}`\n\n" + "\n".join(rows) + "\n")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
