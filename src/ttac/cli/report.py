"""`ttac report`."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from ttac.cli.common import new_parser, run_job


def report_parser() -> ArgumentParser:
    """Describe `ttac report`."""
    parser = new_parser("Make tables, figures and a page from the records that ttac bench wrote, beside the paper's.")
    add = parser.add_argument
    add("results", type=Path, metavar="FOLDER", help="of ttac bench: records, below folders of experiments and scales")
    add(
        "--out",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="where index.html, README.md, tables and figures go; links to records are relative: move both together",
    )
    add(
        "--experiment",
        type=str,
        nargs="+",
        default=[],
        metavar="NAME",
        help="these alone (default: all that are there)",
    )
    return parser


def report_command(chosen: Namespace) -> int:
    """Write the report."""
    from ttac.benchmark.report.job import ReportJob, run_report

    return run_job(run_report, ReportJob(chosen.results, chosen.out, tuple(chosen.experiment)))
