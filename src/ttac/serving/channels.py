"""What the processes of a server share, made before they are forked."""

from __future__ import annotations

import mmap
import secrets
import socket
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ttac.serving.shared import SampleRing, Slots

STATUS_SIZE = 256 * 1024  # most bytes of the adapter's status
MESSAGE_SIZE = 64 * 1024  # most bytes of a command


@dataclass(frozen=True)
class Channels:
    """Weights and status from the adapter, samples to it, and commands between the two.

    >>> channels = Channels.make((3, 8, 8), weights_size=100, buffer=4)
    >>> channels.weights.version, channels.ring.waiting, int(channels.busy[0])
    (0, 0, 0)
    """

    weights: Slots
    status: Slots
    ring: SampleRing
    busy: NDArray[np.int64]  # one number: images that wait in the predictor
    progress: NDArray[np.int64]  # of learners, in two numbers that only grow: see `Learner`
    predictor_end: socket.socket  # datagrams, of which neither end ever waits for the other
    adapter_end: socket.socket
    life: str  # tells this memory from that of an earlier server: the ring's positions are of this one alone

    @classmethod
    def make(cls, shape: tuple[int, int, int], weights_size: int, buffer: int) -> Channels:
        """Make empty ones, for weights of so many bytes and a buffer of so many samples `[C, H, W]`."""
        predictor_end, adapter_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        predictor_end.setblocking(False)
        adapter_end.setblocking(False)
        return cls(
            weights=Slots(_memory(Slots.bytes_needed(weights_size)), weights_size),
            status=Slots(_memory(Slots.bytes_needed(STATUS_SIZE)), STATUS_SIZE),
            ring=SampleRing(_memory(SampleRing.bytes_needed(shape, buffer)), shape, buffer),
            busy=np.frombuffer(_memory(8), np.int64),
            progress=np.frombuffer(_memory(16), np.int64),
            predictor_end=predictor_end,
            adapter_end=adapter_end,
            life=secrets.token_hex(8),
        )


def _memory(size: int) -> memoryview:
    """Make zeroed memory that forks of this process share."""
    return memoryview(mmap.mmap(-1, size))
