"""How a network is run, apart from what it computes: memory layout, precision and compilation."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttac.model.heads import first_parameter
from ttac.model.norms import batch_norms

Precision = Literal["bfloat16"]

# Of torch.cpu.get_capabilities, on x86 and on Arm.
BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
# Graphs that torch may compile before it gives up and runs without: for each mode, gradient or none, and network.
MOST_GRAPHS = 64

Pass = Callable[[nn.Module, list[Tensor], Tensor], tuple[tuple[Tensor, ...], Any]]


@dataclass(frozen=True)
class Speed:
    """What `Classifier.tuned` sets; the weights, and so fingerprints and statistics, are the same with all of them.

    >>> Speed(compile=True).settings()
    {'channels_last': None, 'autocast': None, 'compile': True}
    """

    channels_last: bool = False  # memory layout of the weights, faster for convolutions of many channels
    autocast: Precision | None = None  # precision of forward passes; losses and statistics stay in float32
    compile: bool = False

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
        if self.compile:
            check_compiler()
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


def check_compiler() -> None:
    """Raise an error unless there is the C++ compiler that torch.compile calls."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name) is None:
        raise ValueError(f"compile needs a C++ compiler and {name} is not there: install one, or name it in CXX")


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


def plain_pass(model: nn.Module, seen: list[Tensor], pixels: Tensor) -> tuple[tuple[Tensor, ...], Any]:
    """Run a model, and give what its hooks have put into `seen` with its output."""
    output = model(pixels)
    return tuple(seen), output  # not left in the list: what compiled code gives back is sure to be of this call


def compiled_pass(model: nn.Module, seen: list[Tensor], pixels: Tensor) -> tuple[tuple[Tensor, ...], Any]:
    """Do the same in compiled code, which copies of a network share; sizes that vary are compiled twice.

    A single image runs as it is: torch would compile that size apart, and it may be but a check.
    """
    if len(pixels) == 1:
        return plain_pass(model, seen, pixels)
    with _steady_momentum(model), torch._dynamo.config.patch(cache_size_limit=MOST_GRAPHS):
        try:
            return _compiled()(model, seen, pixels)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise ValueError(f"torch cannot compile this network, use it without compile: {error}") from error


@cache
def _compiled() -> Pass:
    return torch.compile(plain_pass)


@contextmanager
def _steady_momentum(model: nn.Module) -> Iterator[None]:
    """Average batch-norm statistics outside the pass, whose code would be compiled anew for every momentum.

    With a momentum of 1 the pass stores the statistics of its batch alone, in copies, as autograd may keep them.
    """
    layers = batch_norms(model)
    momenta = [layer.momentum for layer in layers]
    learning = [layer for layer in layers if layer.training]
    stored = [(layer.get_buffer("running_mean"), layer.get_buffer("running_var")) for layer in learning]
    for layer in layers:
        layer.momentum = 1.0
    for layer, (mean, variance) in zip(learning, stored, strict=True):
        layer.running_mean, layer.running_var = mean.clone(), variance.clone()
    batches = [int(layer.get_buffer("num_batches_tracked")) for layer in learning]
    found: list[tuple[Tensor, Tensor]] = []
    try:
        yield
        found = [(layer.get_buffer("running_mean"), layer.get_buffer("running_var")) for layer in learning]
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for layer, (mean, variance) in zip(learning, stored, strict=True):
            layer.running_mean, layer.running_var = mean, variance
    for layer, before in zip(learning, batches, strict=True):
        if int(layer.get_buffer("num_batches_tracked")) > before + 1:
            raise ValueError(
                "a batch-norm layer of this network runs several times in a pass, and compiled code keeps the "
                "statistics of the last time alone: use it without compile"
            )
    with torch.no_grad():
        for layer, buffers, statistics in zip(learning, stored, found, strict=True):
            for buffer, statistic in zip(buffers, statistics, strict=True):
                buffer.lerp_(statistic, _share(layer))


def _share(layer: _BatchNorm) -> float:
    """Give the weight of the last batch: the momentum, or that of an average of all batches where there is none."""
    return 1 / int(layer.num_batches_tracked) if layer.momentum is None else layer.momentum  # type: ignore[arg-type]
