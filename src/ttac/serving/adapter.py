"""The process that learns."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import torch
from rich.console import Console

from ttac.adaptation.guard import Guard, GuardOptions
from ttac.model.weights import usable_device
from ttac.serving.channels import Channels, Server
from ttac.serving.learner import Learner, LearnerSettings
from ttac.serving.logs import write_logs
from ttac.serving.prepare import INFERRED
from ttac.serving.state_folder import StateFolder
from ttac.source.bundle import Bundle

HOPELESS = 2  # ends without progress in a row, after which the samples at hand are taken to be the reason
# Where both processes want one core, a tenth is left for learning: the lowest priority could stop it for ever on a
# machine that does other work.
GIVE_WAY = 10
LONGEST_WAIT = 0.05  # seconds that a step waits for requests


def run_adapter(server: Server, failures: int) -> None:
    """Learn from the samples that the predictor hands on, until a signal ends it."""
    job = server.job
    server.listening.close()  # or clients would connect when the predictor has ended, and wait
    write_logs("adapter")
    noted: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: noted.append(number))
    torch.set_num_threads(1)  # until it gives way: threads have the priority of who starts them
    method = job.prepare_method()
    server.facts.check(method.model.classifier)
    adapter = method.adapter(Console(quiet=True), keep=job.state / INFERRED)
    device = usable_device(job.adapt_on)
    if device.type != "cpu" and device == usable_device(job.predict_on):  # cuda is cuda:0
        adapter.before_step = partial(_wait_for, server.channels)
    settings = LearnerSettings(
        snapshot_every=job.snapshot_every,
        publish_every=job.publish_every,
        keep=job.keep,
        paused=job.paused,
        skip_waiting=failures >= HOPELESS,
        identity=server.facts.identity,
    )
    # The guard has the adapter's statistics, or those of the bundle where the method has none.
    bundled = method.model.statistics if isinstance(method.model, Bundle) else None
    options = GuardOptions(narrow=job.guard_narrow)
    guard = Guard(method.model.classifier, adapter.stats or bundled, options) if job.guard else None
    os.nice(GIVE_WAY)
    torch.set_num_threads(job.threads_adapt)
    Learner(adapter, guard, server.channels, StateFolder(job.state), settings).run(lambda: bool(noted))


def _wait_for(channels: Channels) -> None:
    """Wait while requests do, but not for ever: on one accelerator their kernels queue behind those of a step."""
    until = time.monotonic() + LONGEST_WAIT
    while channels.busy[0] and time.monotonic() < until:
        time.sleep(0.001)
