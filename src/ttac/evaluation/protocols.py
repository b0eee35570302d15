"""What a comparison may use: six frozen values, and the refusals that keep them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ttac.adaptation.adapter import Adapter
from ttac.adaptation.method import Method


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


def check_defined(method: type[Method], protocol: Protocol) -> None:
    """Raise an error where a method is not defined under a protocol."""
    able = method.capabilities
    if protocol.name not in able.protocols:
        allowed = ", ".join(able.protocols)
        raise ProtocolError(f"{able.title} is not defined under {protocol.name}; it runs under {allowed}")


def check_epochs(protocol: Protocol, epochs: int | None) -> None:
    """Raise an error where a one-pass protocol is to have epochs."""
    if protocol.passes == "one" and epochs is not None:
        raise ProtocolError(f"{protocol.name} reads every sample once: epochs belong to the multi-pass protocols")


def check_protocol(adapter: Adapter, protocol: Protocol) -> None:
    """Raise an error where the adapter needs more than the protocol allows, before anything runs."""
    able = adapter.capabilities
    check_defined(type(adapter.method), protocol)
    for kind, known in adapter.knowledge.items():
        if known.level == "light" and protocol.source == "free":
            raise ProtocolError(
                f"{protocol.name} is source-free, and this {able.title} holds {kind} collected from source samples: "
                f"infer them from the weights (SourceStatistics.infer), or use the protocol "
                f"{protocol.name.replace('SF', 'SL')}"
            )
        if known.level == "objective" and not protocol.modified_objective:
            raise ProtocolError(
                f"{protocol.name} leaves source training as it is, and this {able.title} uses the model's {kind}: "
                f"switch that off, or use the protocol Y{protocol.name[1:]}"
            )
    if protocol.modified_objective and not any(kind.endswith(" branch") for kind in adapter.brings):
        raise ProtocolError(
            f"{protocol.name} is for models trained with a branch, and this one has none: train it with "
            f"ce+contrastive or ce+rotation, or use the protocol N{protocol.name[1:]}"
        )
    if protocol.modified_objective and able.may_use and not set(able.may_use) & set(adapter.uses):
        raise ProtocolError(
            f"{protocol.name} is for what the branch of source training brings, and this {able.title} leaves its "
            f"{able.may_use[0]} unused: give that loss a weight, or use the protocol N{protocol.name[1:]}"
        )
    if protocol.passes == "multi" and adapter.options.reset_every:
        raise ProtocolError(
            f"{protocol.name} learns from a target set over several passes, which reset_every would forget: set it to 0"
        )
    if protocol.passes == "one" and adapter.several_passes:
        raise ProtocolError(
            f"{protocol.name} reads every sample once, and this {able.title} has been through a target set: call "
            "adapter.reset()"
        )
