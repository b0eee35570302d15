"""Weight files that say what they hold, and classifiers from them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor, nn

from ttac.common.lookup import some
from ttac.common.options import Checked, check_value, setting
from ttac.model.architectures import Build, architectures, usual_pixels
from ttac.model.classifier import Classifier
from ttac.model.heads import evaluating, input_channels
from ttac.model.pixels import UnknownPixelsError, takes_features
from ttac.model.state_dicts import StateDict, read_file
from ttac.model.tensors import write_tensors

if TYPE_CHECKING:
    from rich.console import Console

MOST = 256  # channels, or layers and widths: a forged file must not ask for more memory than there is
METADATA_KEY = "ttac"  # alone, because safetensors writes several keys in random order


@dataclass(frozen=True)
class ModelDescription(Checked):
    """What weights need to be used: their network, and the images that it takes.

    >>> ModelDescription.parse(ModelDescription("resnet20", 10, size=(32, 32)).text()).size
    (32, 32)
    """

    arch: str
    num_classes: int = setting(help="of the head", least=1)
    channels: int = setting(3, "of an image", least=1, most=MOST)
    mean: tuple[float, ...] | None = setting(None, "of the pixels, by channel")
    std: tuple[float, ...] | None = setting(None, "of the pixels, by channel")
    size: tuple[int, int] | None = setting(None, "height, width", least=1)
    classes: tuple[str, ...] | None = setting(None, "their names by number")
    crop_pct: float = setting(1.0, "share of an image file's side that is left when it is cropped", above=0, most=1)
    head: str | None = setting(None, "dotted name of the final linear layer")
    arch_options: Mapping[str, int] = setting(help="of a network of this package", make=dict)
    config: Mapping[str, Any] = setting(help="what the network's library makes it from, plain values", make=dict)

    def check(self) -> None:
        """Refuse class names of another number, and options that make no sense."""
        if self.classes is not None and len(self.classes) != self.num_classes:
            raise ValueError(f"there are {len(self.classes)} class names for {self.num_classes} classes")
        for name, value in self.arch_options.items():
            check_value(name, value, int, {"least": 1, "most": MOST})

    def of(self, classifier: Classifier) -> ModelDescription:
        """Take from a classifier what it knows best, its normalisation as it is stored among it."""
        return dataclasses.replace(
            self,
            num_classes=classifier.num_classes,
            channels=classifier.channels,
            mean=tuple(classifier.mean.flatten().tolist()),
            std=tuple(classifier.std.flatten().tolist()),
            head=classifier.head_name,
        )

    def text(self) -> str:
        """Write the description as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> ModelDescription:
        """Read what `text` wrote, or raise a ValueError that names the field."""
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls)
        try:
            values = parser.parse_object(json.loads(text)).as_dict()
            return cls(**values)
        except (ArgumentError, TypeError, AttributeError, OverflowError, json.JSONDecodeError) as error:
            raise ValueError(f"the description of the model is damaged: {error}") from error


class KnownNetwork(NamedTuple):
    """A network with its weights, and what is known of it before it is a classifier."""

    network: nn.Module
    description: ModelDescription
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadedModel:
    """A classifier, the description that it can be saved with, and notes on how it was read that a user should see."""

    classifier: Classifier
    description: ModelDescription
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    def tell(self, console: Console) -> None:
        """Print the notes."""
        for note in self.notes:
            console.print(note, markup=False)


def save_model(path: Path | str, network: nn.Module, description: ModelDescription) -> None:
    """Write the weights and their description as a safetensors file, atomically."""
    write_tensors(path, network.state_dict(), {METADATA_KEY: description.text()})


def classifier_of(
    network: nn.Module,
    description: ModelDescription,
    notes: tuple[str, ...] = (),
    *,
    head: str | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    device: str = "cpu",
) -> LoadedModel:
    """Make a classifier on a device, and complete the description by what the classifier finds out."""
    mean = mean if mean is not None else description.mean
    std = std if std is not None else description.std
    # What the network says itself is of weights that it no longer has.
    if (mean is None or std is None) and not takes_features(network):
        usual = usual_pixels(description.arch) if input_channels(network) in (3, None) else None
        raise UnknownPixelsError(description.arch, usual)
    classifier = Classifier(
        network.to(usable_device(device)).eval(), head or description.head or None, mean=mean, std=std
    )
    return LoadedModel(classifier, description.of(classifier), notes=notes)


def usable_device(name: str) -> torch.device:
    """Give the device of that name, or raise an error where it is not there.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch has no type of its own for a device that is not there
        raise ValueError(f"device {name!r} cannot be used: {_first_line(error)}") from error


def check_size(classifier: Classifier, size: tuple[int, int]) -> None:
    """Run the model once, so that images it cannot take are refused before anything is written."""
    try:
        image = torch.zeros(1, classifier.channels, *size, device=classifier.device)
        with evaluating(classifier), torch.no_grad():
            classifier(image)
    except (RuntimeError, AssertionError, TypeError, OverflowError) as error:  # the last two: no size of a tensor
        reason = _first_line(error)
        raise ValueError(f"the model does not take {size[0]} x {size[1]} images ({reason}): set --size") from error


def read_weights(
    path: Path,
    arch: str | None = None,
    num_classes: int | None = None,
    *,
    trust_pickle: bool = False,
) -> KnownNetwork:
    """Read a file of weights into a network; what is given here wins over what the file says of itself.

    With `trust_pickle` the file may be a pickled module too, and whatever it holds is run.
    """
    content, notes = read_file(path, trust_pickle=trust_pickle)
    if isinstance(content, nn.Module):
        kind = type(content)
        return KnownNetwork(content, ModelDescription(arch or f"{kind.__module__}:{kind.__qualname__}", 1))
    described = None
    if METADATA_KEY in notes:
        try:
            described = ModelDescription.parse(notes[METADATA_KEY])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    if described is not None and described.arch != (arch or described.arch):
        described = dataclasses.replace(described, arch_options={}, config={})
    if arch is None:
        if described is None:
            raise ValueError(f"{path} does not say which network its weights are of: name it with --arch")
        arch = described.arch
        if ":" in arch:
            raise ValueError(
                f"{path} is of the network {arch!r}, which is code to import; it is run only where you ask for it: "
                f"add --arch {arch} if you trust it"
            )
    if num_classes is None and described is not None:
        num_classes = described.num_classes
    # Checked before a network of that size is made: a forged number would ask for more memory than there is.
    most_rows = max((len(tensor) for tensor in content.tensors.values() if tensor.ndim), default=0)
    if num_classes is not None and num_classes > most_rows:
        raise ValueError(f"the weights in {path} are of fewer than {num_classes} classes")
    channels = None if described is None else described.channels
    # 1 stands in: `classifier_of` reads the number of classes off the classifier.
    description = dataclasses.replace(described or ModelDescription(arch, 1), arch=arch)
    options, config = description.arch_options, description.config
    problems = []
    for origin, build in architectures(arch, channels=channels, options=options, config=config, weights=content):
        network, weights, problem = _try(build, content, num_classes, shapes_first=origin == "transformers")
        if problem is None:
            network.load_state_dict(weights.tensors, strict=False)  # old files lack batch norm's num_batches_tracked
            return KnownNetwork(network, description, weights.notes())
        problems.append(f"{arch} of {origin}: {problem}")
    raise ValueError(f"the weights in {path} do not fit {'; '.join(problems)}")


def _try(
    build: Build, content: StateDict, num_classes: int | None, *, shapes_first: bool
) -> tuple[nn.Module, StateDict, str | None]:
    """Make a network for weights, and say where they do not fit.

    With `shapes_first` it takes memory only if they do, as a forged config may ask for more than there is.
    """
    with torch.device("meta") if shapes_first else nullcontext():
        network = build(num_classes)
    weights = content.read_for(network)
    if num_classes is None and (num_classes := _classes_of(weights.tensors, network)) is not None:
        network = build(num_classes)
    problem = misfit(network, weights.tensors)
    return build(num_classes) if shapes_first and problem is None else network, weights, problem


def _classes_of(weights: Mapping[str, Tensor], network: nn.Module) -> int | None:
    """Count the classes by the layers that differ from a network's in their rows alone; None where none do."""
    pairs = [(weights[name], tensor) for name, tensor in network.state_dict().items() if name in weights]
    rows = {len(ours) for ours, its in pairs if ours.shape != its.shape and ours.shape[1:] == its.shape[1:]}
    return rows.pop() if len(rows) == 1 else None


def misfit(network: nn.Module, weights: Mapping[str, Tensor]) -> str | None:
    """Say where names or shapes differ, None where they fit.

    >>> misfit(nn.Linear(2, 1), {"weight": torch.zeros(1, 2)})
    '1 missing (bias)'
    """
    expected = network.state_dict()
    lists = {
        "missing": [n for n in expected if n not in weights and not n.endswith("num_batches_tracked")],
        "unexpected": [n for n in weights if n not in expected],
        "of another shape": [
            f"{name} {tuple(weights[name].shape)} for {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in weights and weights[name].shape != tensor.shape
        ],
    }
    return ", ".join(f"{len(names)} {what} ({some(names, 3)})" for what, names in lists.items() if names) or None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:200]
