"""What `ttac bench`, `ttac report` and `ttac demo` do; their command lines are made of it, so nothing imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ttac.common.files import user_cache
from ttac.common.options import Checked, SettingError, setting
from ttac.evaluation.loggers import check_log, log_setting


@dataclass(frozen=True)
class BenchJob(Checked):
    """Which experiment to run at which scale, how, and where its records go."""

    file: Path = setting(Path(), option=None)
    out: Path = setting(Path("results"), "for records", output="folder")
    scale: Literal["tiny", "cpu", "paper"] = setting("tiny", "seconds, up to an hour, or as published")
    overrides: tuple[str, ...] = setting(
        (),
        "over the file, such as seeds=[0,1] targets.C10-C.samples=500",
        option="set",
        action="extend",
        metavar="PATH=VALUE",
    )
    bundles: Mapping[str, str] = setting(
        make=dict, help="trained source models (default: they are trained)", option="source", metavar="NAME=BUNDLE"
    )
    cache: Path = setting(
        make=lambda: user_cache() / "bench", help="for what runs need (default: the user's cache)", output="folder"
    )
    jobs: int = setting(1, "processes", least=1)
    threads: int | None = setting(None, "of a process (default: the machine's, divided)", least=1)
    shard: tuple[int, int] = setting((1, 1), "do this part of the runs alone", separator="/", metavar="I/N")
    only: tuple[str, ...] = setting((), "do runs of these names alone, such as '*-tent-*'", action="extend")
    dry_run: bool = setting(False, "list the runs with an estimated time, and end")
    device: str = setting("cpu", "cpu, cuda, ...")
    log: tuple[str, ...] = log_setting()

    def check(self) -> None:
        """Refuse a part that is none, and loggers that there are none of."""
        check_log(self.log)
        if len(self.shard) != 2 or not 1 <= self.shard[0] <= self.shard[1]:
            raise SettingError("shard", f"must be I/N with I from 1 to N, not {'/'.join(map(str, self.shard))}")


@dataclass(frozen=True)
class BenchesJob(Checked):
    """Run experiments of many runs each; what has a record is not run again."""

    each: BenchJob
    experiments: tuple[str, ...] = setting(
        help="names, such as protocols (a wrong one lists them, all is all of them), or YAML files", positional=True
    )


@dataclass(frozen=True)
class ReportJob(Checked):
    """Make tables, figures and a page from the records that ttac bench wrote, beside the paper's."""

    results: Path = setting(help="of ttac bench: records, below folders of experiments and scales", positional=True)
    out: Path = setting(
        help="where index.html, README.md, tables and figures go; links to records are relative: move both together",
        output="folder",
    )
    experiments: tuple[str, ...] = setting((), "these alone (default: all that are there)", option="experiment")


@dataclass(frozen=True)
class DemoJob(Checked):
    """Train a small network, shift its test images, adapt to them, and report."""

    out: Path = setting(Path("out/demo"), "report", output="folder")
    seed: int = setting(0, "of everything random", least=0)
    cache: Path = setting(
        make=user_cache, help="keeps the trained network (default: the user's cache)", output="folder"
    )
