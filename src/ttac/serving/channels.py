"""What the processes of a server share, made before they are forked."""

from __future__ import annotations

import mmap
import secrets
import socket
from dataclasses import dataclass

import numpy as np

from ttac.serving.prepare import Facts
from ttac.serving.settings import ServeJob
from ttac.serving.shared import SampleRing, Slots

STATUS_SIZE = 256 * 1024  # most bytes of the adapter's status
MESSAGE_SIZE = 64 * 1024  # most bytes of a command


class Channels:
    """Weights and status from the adapter, samples to it, and commands between the two.

    They are made empty, for weights of so many bytes and a buffer of so many samples `[C, H, W]`.

    >>> channels = Channels((3, 8, 8), weights_size=100, buffer=4)
    >>> channels.weights.version, channels.ring.waiting, int(channels.busy[0])
    (0, 0, 0)
    """

    def __init__(self, shape: tuple[int, int, int], weights_size: int, buffer: int) -> None:
        self.weights = Slots(_memory(Slots.bytes_needed(weights_size)), weights_size)
        self.status = Slots(_memory(Slots.bytes_needed(STATUS_SIZE)), STATUS_SIZE)
        self.ring = SampleRing(_memory(SampleRing.bytes_needed(shape, buffer)), shape, buffer)
        self.busy = np.frombuffer(_memory(8), np.int64)  # one number: images that wait in the predictor
        self.progress = np.frombuffer(_memory(16), np.int64)  # of learners: see `Learner`, two numbers that only grow
        self.restarts = np.frombuffer(_memory(16), np.int64)  # of the predictor and of the adapter
        # Datagrams, of which neither end ever waits for the other.
        self.predictor_end, self.adapter_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.predictor_end.setblocking(False)
        self.adapter_end.setblocking(False)
        # Tells this memory from that of an earlier server: the ring's positions are of this one alone.
        self.life = secrets.token_hex(8)


def _memory(size: int) -> memoryview:
    """Make zeroed memory that forks of this process share."""
    return memoryview(mmap.mmap(-1, size))


@dataclass(frozen=True)
class Server:
    """A job with all that was made for it before the fork."""

    job: ServeJob
    facts: Facts
    channels: Channels
    listening: socket.socket
    admin_token: str
