"""Which pixels a network takes: said by the user or by the model itself, and never guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


class Pixels(NamedTuple):
    """The mean and standard deviation that images in [0, 1] are normalised by, by channel or one for all."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET = Pixels((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
RAW = Pixels((0.0,), (1.0,))


class UnknownPixelsError(ValueError):
    """Nothing says how a network wants its pixels normalised; the message names the ways out."""

    def __init__(self, network: str, usual: Pixels | None = None, hint: str = "", *, options: bool = False) -> None:
        self.network, self.usual, self.hint = network, usual, hint
        example = Pixels(("...",), ("...",))  # type: ignore[arg-type]
        said, raw = (_as_options, "--mean 0 --std 1") if options else (_as_arguments, "mean=0, std=1")
        super().__init__(
            f"nothing says how {network} wants its pixels normalised: give {said(usual or example)}"
            f"{f' if it was trained with the usual values of {network}' if usual else ''}, or {raw} if it takes raw "
            f"pixels in [0, 1]{hint}"
        )

    def as_options(self) -> UnknownPixelsError:
        """Say the same to somebody who types a command."""
        return UnknownPixelsError(self.network, self.usual, self.hint, options=True)


def pretrained_config(model: nn.Module) -> Mapping[str, Any]:
    """Read timm's `pretrained_cfg`, a dict or a dataclass; other models have an empty one.

    >>> pretrained_config(nn.Linear(4, 2))
    {}
    """
    config = getattr(model, "pretrained_cfg", None) or {}
    return config if isinstance(config, Mapping) else vars(config)


def pixels_of(
    model: nn.Module, mean: float | Sequence[float] | None, std: float | Sequence[float] | None
) -> Pixels | tuple[None, None]:
    """Complete what is given by what the model says itself; Nones where it takes features, which have no pixels.

    >>> pixels_of(nn.Conv2d(3, 8, 3), mean=0.5, std=[0.2, 0.2, 0.3])
    Pixels(mean=(0.5,), std=(0.2, 0.2, 0.3))
    """
    config = pretrained_config(model)
    mean = mean if mean is not None else config.get("mean")
    std = std if std is not None else config.get("std")
    if mean is not None and std is not None:
        return Pixels(_numbers(mean), _numbers(std))
    if mean is None and std is None and takes_features(model):
        return None, None
    name, library = type(model).__name__, type(model).__module__
    if library.startswith("torchvision.models"):
        raise UnknownPixelsError(
            name, IMAGENET, "; ttac.load_model('name:WEIGHTS') knows those of torchvision's weights"
        )
    if library.startswith("transformers."):
        raise UnknownPixelsError(name, hint="; ttac.load_model reads them from the model's image processor")
    raise UnknownPixelsError(name)


def takes_features(model: nn.Module) -> bool:
    """Whether the first layer is linear, so that the input may be features rather than images.

    A linear layer can also be given flattened pixels: `ImageInput.normalise` refuses images that nothing is known of.
    """
    return isinstance(next(module for module in model.modules() if not any(True for _ in module.children())), nn.Linear)


def _numbers(values: float | Sequence[float]) -> tuple[float, ...]:
    return tuple(torch.as_tensor(values, dtype=torch.float64).flatten().tolist())


def _as_arguments(pixels: Pixels) -> str:
    return ", ".join(f"{name}={_listed(', ', values)}" for name, values in pixels._asdict().items())


def _as_options(pixels: Pixels) -> str:
    return " ".join(f"--{name} {' '.join(map(str, values))}" for name, values in pixels._asdict().items())


def _listed(separator: str, values: tuple[object, ...]) -> str:
    words = separator.join(map(str, values))
    return words if len(values) == 1 else f"[{words}]"
