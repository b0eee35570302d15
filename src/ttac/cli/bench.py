"""`ttac bench`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt

from ttac.cli.common import new_parser, run_job


def bench_parser() -> ArgumentParser:
    """Describe `ttac bench`."""
    parser = new_parser("Run experiments of many runs each; what has a record is not run again.")
    add = parser.add_argument
    add("experiments", type=Path, nargs="+", metavar="FILE", help="YAML files, such as experiments/protocols.yaml")
    add(
        "--scale",
        type=Literal["tiny", "cpu", "paper"],
        default="tiny",
        metavar="NAME",
        help="tiny (embedded digits, seconds), cpu (small network, up to an hour) or paper (default: %(default)s)",
    )
    add("--out", type=Path, default=Path("results"), metavar="FOLDER", help="for records (default: %(default)s)")
    add(
        "--set",
        type=str,
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH=VALUE",
        help="override the file, such as seeds=[0,1] targets.C10-C.samples=500",
    )
    add(
        "--source",
        type=str,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=BUNDLE",
        help="trained source models to use (default: they are trained)",
    )
    add("--cache", type=Path, metavar="FOLDER", help="for what runs need (default: the user's cache)")
    add("--device", type=str, default="cpu", metavar="NAME", help="cpu, cuda, ... (default: %(default)s)")
    add("--jobs", type=PositiveInt, default=1, metavar="N", help="processes (default: %(default)s)")
    add("--threads", type=PositiveInt, metavar="N", help="of a process (default: the machine's, divided)")
    add("--shard", type=str, default="1/1", metavar="I/N", help="do this part of the runs alone")
    add("--dry_run", "--dry-run", action="store_true", help="list the runs with an estimated time, and end")
    return parser


def bench_command(chosen: Namespace) -> int:
    """Do the runs of some experiments."""
    from ttac.benchmark.job import BenchJob, run_benches
    from ttac.common.files import user_cache

    jobs = [
        BenchJob(
            file=file,
            out=chosen.out,
            scale=chosen.scale,
            overrides=tuple(chosen.set),
            bundles=_bundles(chosen.source),
            cache=chosen.cache or user_cache() / "bench",
            jobs=int(chosen.jobs),
            threads=None if chosen.threads is None else int(chosen.threads),
            shard=_shard(chosen.shard),
            dry_run=chosen.dry_run,
            device=chosen.device,
        )
        for file in chosen.experiments
    ]
    return run_job(run_benches, jobs)


def _bundles(words: Sequence[str]) -> dict[str, str]:
    pairs = [word.partition("=")[::2] for word in words]
    for word, (name, bundle) in zip(words, pairs, strict=True):
        if not (name and bundle):
            raise ValueError(f"--source {word} is not of the form NAME=BUNDLE")
    return dict(pairs)


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None:
        raise ValueError(f"--shard {text} is not of the form I/N, such as 1/4")
    return int(found[1]), int(found[2])
