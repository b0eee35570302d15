"""The process that answers."""

from __future__ import annotations

import gc
import math

import torch
import uvicorn

from ttac.serving.app import build_app
from ttac.serving.channels import Server
from ttac.serving.connections import allowed_connections, bounded
from ttac.serving.limits import HttpSettings
from ttac.serving.logs import write_logs
from ttac.serving.service import PredictorService

LEAST_JSON = 2**20  # bytes; more only where an image needs it
DIGITS = 24  # bytes of a number in JSON, with what stands between two
LOOPBACK = ("127.", "::1", "localhost")


def run_predictor(server: Server, failures: int) -> None:
    """Answer requests until a signal ends it; what was accepted is finished."""
    job = server.job
    write_logs("predictor")
    torch.set_num_threads(job.threads_predict)
    loaded = job.load(job.predict_on)
    server.facts.check(loaded.classifier)
    service = PredictorService(server, loaded)
    settings = HttpSettings(
        token=job.token,
        admin_token=server.admin_token,
        hosts=job.allow_host if job.allow_host or job.host.startswith(LOOPBACK) else None,  # None: any
        max_body=job.max_body,
        max_json=max(LEAST_JSON, DIGITS * math.prod(server.facts.shape)),
        max_pixels=job.max_pixels,
        body_seconds=job.timeout,
        answer_seconds=job.timeout,
    )

    app = build_app(service, settings, lambda _app: service.running())
    gc.freeze()  # all that is here stays: to look through it for garbage takes a tenth of a second that requests wait
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=job.log_requests,
        http=bounded(job.timeout, allowed_connections()),
        timeout_graceful_shutdown=round(job.timeout) + 1,
        server_header=False,
        ws="none",
    )
    uvicorn.Server(config).run(sockets=[server.listening])
