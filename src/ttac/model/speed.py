"""How a network is run, apart from what it computes: memory layout and precision."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ttac.model.heads import first_parameter

Precision = Literal["bfloat16"]

# Of torch.cpu.get_capabilities, on x86 and on Arm.
BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")


@dataclass(frozen=True)
class Speed:
    """What `Classifier.tuned` sets; the weights, and so fingerprints and statistics, are the same with all of them.

    >>> Speed(channels_last=True).settings()
    {'channels_last': True, 'autocast': None}
    """

    channels_last: bool = False  # memory layout of the weights, faster for convolutions of many channels
    autocast: Precision | None = None  # precision of forward passes; losses and statistics stay in float32

    def __post_init__(self) -> None:
        """Refuse what cannot be had."""
        if self.autocast not in (None, "bfloat16"):
            raise ValueError(
                f'autocast must be "bfloat16" or None, not {self.autocast!r}: float16 would need its losses scaled'
            )

    def settings(self) -> dict[str, Any]:
        """Say what is on; what is off is None, as in records of versions that did not have it."""
        return {name: value or None for name, value in vars(self).items()}

    def check(self, model: nn.Module, device: torch.device) -> None:
        """Raise an error where this cannot be had for a model on a device, and warn where it cannot be fast."""
        dtype = first_parameter(model).dtype
        if self.autocast is not None and dtype != torch.float32:
            raise ValueError(f"autocast is for float32 weights, and these are {dtype}: use one or the other")
        if device.type != "cpu":
            return
        if self.channels_last:
            _check_strided_convolutions(model)
        if self.autocast is not None and bfloat16_in_hardware() is False:
            warnings.warn(
                "this processor has no bfloat16 instructions: autocast gives the same predictions within rounding, "
                "but several times slower than without",
                stacklevel=3,
            )

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """Give the context of a forward pass."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, torch.bfloat16)


def _check_strided_convolutions(model: nn.Module) -> None:
    """Refuse layers whose gradient oneDNN writes beyond its memory, which ends the process or spoils the weights.

    https://github.com/uxlfoundation/oneDNN/issues/6035: fewer input channels than fit a vector, with a stride.
    """
    vector = 16 if "512" in torch.backends.cpu.get_cpu_capability() else 8
    for name, layer in model.named_modules():
        strided = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and max(layer.stride) > 1
        if strided and layer.in_channels // layer.groups < vector:
            raise ValueError(
                f"channels_last is not safe for this network: {name} is a 1 x 1 convolution with a stride and fewer "
                f"than {vector} input channels, whose gradient torch computes wrongly in that layout on this processor"
            )


def bfloat16_in_hardware() -> bool | None:
    """Tell whether the processor computes in bfloat16, None where this version of torch does not say."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:
        return None
    found = capabilities()
    return any(found.get(name, False) for name in BFLOAT16_INSTRUCTIONS)
