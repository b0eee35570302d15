"""What both processes of a server have, by way of the fork."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ttac.serving.channels import Channels
from ttac.serving.prepare import Facts
from ttac.serving.settings import ServeJob


@dataclass(frozen=True)
class Server:
    """A job with all that was made for it before the fork."""

    job: ServeJob
    facts: Facts
    channels: Channels
    listening: socket.socket
    admin_token: str
    restarts: NDArray[np.int64]  # of the predictor and of the adapter, in shared memory
