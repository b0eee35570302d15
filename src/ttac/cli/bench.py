"""`ttac bench`."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from ttac.benchmark import job as benchmark
from ttac.benchmark.experiment import find_experiments
from ttac.benchmark.jobs import BenchesJob


def run_benches(job: BenchesJob, console: Console) -> None:
    """Run some experiments, all in the same way."""
    benchmark.run_benches([replace(job.each, file=file) for file in find_experiments(job.experiments)], console)
