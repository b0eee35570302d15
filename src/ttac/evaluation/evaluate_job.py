"""`ttac evaluate`: one method on one stream under one protocol makes one record."""

from __future__ import annotations

from rich.console import Console

from ttac.common.resumable import file_is_there
from ttac.evaluation.engine import shown
from ttac.evaluation.loggers import open_loggers
from ttac.evaluation.prepare import PreparedRun
from ttac.evaluation.records import Record
from ttac.evaluation.spec import EvaluateJob


def run_evaluate(job: EvaluateJob, console: Console) -> None:
    """Do the job, unless its record is there."""
    run = PreparedRun(job.run)
    if file_is_there(job.out, run.settings, lambda: dict(Record.load(job.out).provenance["settings"])):
        console.print(f"{job.out} is there: nothing to do", markup=False)
        return
    adapter = run.method.adapter(console)
    title = f"{adapter.name} under {run.protocol.name}"
    callbacks = open_loggers(job.log, job.out.stem)
    with shown(title, len(run.stream), console) as show:
        record = run.evaluate(adapter, show, callbacks=callbacks)
    for domain, found in record.domain_error.items():  # before they are saved, as a disk may be full
        console.print(f"{domain}: {found['error']:.2f} % error of {found['samples']} samples", markup=False)
    record.save(job.out)
    guarded = f"; {adapter.guard}" if adapter.guard else ""
    console.print(f"{job.out}: {record.error:.2f} % error of {record.samples} samples, {title}{guarded}", markup=False)
