"""What a comparison may use: six frozen values, and the refusals that keep them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Protocol:
    """The answers to: is source training modified, how many passes, what of the source is at hand."""

    name: str
    modified_objective: bool  # Y: source training had an extra branch
    passes: Literal["one", "multi"]  # O: a sample is predicted once, when it arrives
    source: Literal["free", "light"]  # SF: the weights alone; SL: Gaussian statistics of source features too


PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol("N-O-SF", False, "one", "free"),
        Protocol("N-O-SL", False, "one", "light"),
        Protocol("Y-O-SL", True, "one", "light"),
        Protocol("N-M-SF", False, "multi", "free"),
        Protocol("N-M-SL", False, "multi", "light"),
        Protocol("Y-M-SL", True, "multi", "light"),
    )
}


class ProtocolError(ValueError):
    """A method needs more than the protocol allows."""


def get_protocol(protocol: str | Protocol) -> Protocol:
    """Look a protocol up by name.

    >>> get_protocol("N-O-SL").source
    'light'
    """
    if isinstance(protocol, Protocol):
        if PROTOCOLS.get(protocol.name) != protocol:
            raise ProtocolError(f"{protocol} is none of the six protocols: {', '.join(PROTOCOLS)}")
        return protocol
    if protocol not in PROTOCOLS:
        raise ProtocolError(f"unknown protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")
    return PROTOCOLS[protocol]
