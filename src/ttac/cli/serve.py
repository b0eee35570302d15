"""`ttac serve`."""

from __future__ import annotations

import os

from rich.console import Console

from ttac.serving.settings import ServeJob


def run_serve(job: ServeJob, console: Console) -> None:
    """Serve a model until a signal ends it."""
    if not hasattr(os, "fork"):
        raise OSError("ttac serve needs Linux or macOS: on Windows, run it in WSL or in a container")
    # Before numpy is imported: its threads would not outlive a fork.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from ttac.serving import supervisor
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: install what serving needs with pip install 'ttac[serve]'") from error
    supervisor.run_serve(job, console)
