"""Networks by name: of this package, timm, torchvision, transformers, or a module or file of the user's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ttac.common.imports import file_and_name, import_file, optional_package
from ttac.common.lookup import suggestion
from ttac.model.networks import ResNet, ResNet18, ResNet50, VisionTransformer
from ttac.model.pixels import IMAGENET, Pixels
from ttac.model.state_dicts import StateDict

TORCHVISION, TRANSFORMERS = "torchvision/", "transformers/"
# What a description may ask of a library beside the name.
TIMM_OPTIONS, TORCHVISION_OPTIONS = ("img_size", "global_pool"), ("aux_logits", "transform_input")
Build = Callable[[int | None], nn.Module]  # number of classes, None: the architecture's own


@dataclass(frozen=True)
class OwnNetwork:
    """A network of this package: how it is made, what can be set, and the weight of shape `[width, channels, ...]`."""

    make: Callable[..., nn.Module]  # num_classes, channels=..., and the options
    stem: str
    options: tuple[str, ...] = ()


# The names end in _32 where timm or torchvision have one of theirs for larger images.
OWN: Mapping[str, OwnNetwork] = {
    **{
        f"resnet{depth}": OwnNetwork(partial(ResNet, depth), "conv1.weight", ("width", "stem_stride"))
        for depth in (8, 14, 20, 26)
    },
    "resnet18_32": OwnNetwork(ResNet18, "conv1.weight", ("width",)),
    "resnet50_32": OwnNetwork(ResNet50, "conv1.weight"),
    "vit_small_32": OwnNetwork(VisionTransformer, "patch_embed.weight", ("width", "depth")),
}


def new_network(
    arch: str, num_classes: int, *, channels: int = 3, options: Mapping[str, int] | None = None
) -> nn.Module:
    """Make an untrained network by name, of timm where torchvision has the name too.

    >>> import torch
    >>> new_network("resnet8", 10, channels=1, options={"width": 4})(torch.zeros(2, 1, 16, 16)).shape
    torch.Size([2, 10])
    """
    _, build = next(architectures(arch, channels=channels, options=options or {}))
    return build(num_classes)


def architectures(
    arch: str,
    *,
    channels: int | None,
    options: Mapping[str, int],
    config: Mapping[str, Any] | None = None,
    weights: StateDict | None = None,
) -> Iterator[tuple[str, Build]]:
    """Yield everything that has the name, with where it comes from; timm and torchvision share many names.

    "torchvision/NAME" is torchvision's alone, and "transformers/KIND" made from `config`. `weights` that the network is
    to take tell the channels and the width of one of this package, unless given.
    """
    config = config or {}
    unknown = [name for name in options if arch not in OWN or name not in OWN[arch].options]
    if unknown:
        known = ", ".join(f"{name} ({', '.join(own.options)})" for name, own in OWN.items() if own.options)
        raise ValueError(f"{arch} has no option {', '.join(unknown)}; those with options: {known}")
    if arch in OWN:
        yield "ttac", _own(OWN[arch], channels, options, weights)
        return
    if ":" in arch:
        yield "its own module", _factory(arch)
        return
    if arch.startswith(TRANSFORMERS):
        yield "transformers", _transformers(arch.removeprefix(TRANSFORMERS), config)
        return
    (timm, no_timm), (torchvision, no_torchvision) = optional_package("timm"), optional_package("torchvision")
    in_timm = timm is not None and timm.is_model(arch)
    if in_timm:
        wanted = _known_options(config, TIMM_OPTIONS)
        yield "timm", lambda count: timm.create_model(arch, in_chans=channels or 3, **wanted, **_count(count))
    name = arch.removeprefix(TORCHVISION)
    in_torchvision = torchvision is not None and name in torchvision.models.list_models(module=torchvision.models)
    if in_torchvision:
        asked = _known_options(config, TORCHVISION_OPTIONS)
        yield "torchvision", lambda count: torchvision.models.get_model(name, **asked, **_count(count))
    if not in_timm and not in_torchvision:
        raise ValueError(
            f"unknown architecture {arch!r}: neither {', '.join(OWN)}, nor package.module:callable, nor "
            f"path/to/file.py:callable, {no_timm or 'nor a timm name'}, {no_torchvision or 'nor a torchvision name'}"
            f"{'' if timm is None else suggestion(arch, timm.list_models())}"
        )


def usual_pixels(arch: str) -> Pixels | None:
    """Give the mean and std that a library's weights of this name usually go with, None where that is not known.

    >>> usual_pixels("resnet20") is None
    True
    """
    timm, torchvision = optional_package("timm")[0], optional_package("torchvision")[0]
    if timm is not None and timm.is_model(arch):
        usual = timm.models.get_pretrained_cfg(arch)
        return None if usual is None else Pixels(tuple(usual.mean), tuple(usual.std))
    name = arch.removeprefix(TORCHVISION)
    known = torchvision is not None and name in torchvision.models.list_models(module=torchvision.models)
    return IMAGENET if known else None


def _known_options(config: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """Refuse all but a few options: those of a library could also have files read and fetched."""
    odd = [name for name in config if name not in known]
    if odd:
        raise ValueError(f"the description of the model is damaged: it has no option {', '.join(odd)}")
    return dict(config)


def _count(num_classes: int | None) -> dict[str, int]:
    return {} if num_classes is None else {"num_classes": num_classes}


def _own(own: OwnNetwork, channels: int | None, options: Mapping[str, int], weights: StateDict | None) -> Build:
    chosen = dict(options)
    readings = [] if weights is None else weights.readings()
    stem = next((reading.tensors[own.stem] for reading in readings if own.stem in reading.tensors), None)
    if stem is not None and stem.ndim == 4:
        channels = stem.shape[1]
        if "width" in own.options:
            chosen.setdefault("width", stem.shape[0])
    return lambda count: own.make(count or 10, channels=channels or 3, **chosen)


def _transformers(kind: str, config: Mapping[str, Any]) -> Build:
    transformers, problem = optional_package("transformers")
    if transformers is None:
        raise ValueError(f"a network of transformers cannot be made: {problem}")

    def build(count: int | None) -> nn.Module:
        try:
            described = transformers.AutoConfig.for_model(kind, **config)
            if count is not None and count != described.num_labels:
                described.num_labels = count
            return transformers.AutoModelForImageClassification.from_config(described, trust_remote_code=False)
        except Exception as error:  # of a library, on values that may be forged
            raise ValueError(f"transformers cannot make the network {kind!r} of its config: {error}") from error

    return build


def _factory(arch: str) -> Build:
    module_name, _, name = arch.partition(":")
    try:
        if (place := file_and_name(arch)) is not None:
            file, name = place
            if not file.is_file():
                raise FileNotFoundError(f"no file {file}")
            factory = getattr(import_file(file), name)
        else:
            factory = getattr(importlib.import_module(module_name), name)
    except FileNotFoundError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{arch!r} cannot be imported: {error}") from error
    if not callable(factory):
        raise ValueError(f"{arch!r} is {type(factory).__name__}; expected something to call for a network")
    parameters = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = parameters.get("num_classes")

    def build(count: int | None) -> nn.Module:
        if count is None and named is not None and named.default is named.empty:
            count = 10
        network = factory(**(_count(count) if named is not None or takes_any else {}))
        if not isinstance(network, nn.Module):
            raise ValueError(f"{arch!r} gives {type(network).__name__}; expected a torch.nn.Module")
        return network

    return build
