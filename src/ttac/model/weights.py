"""Weight files that say what they hold, and classifiers from them; nothing in a file is ever run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor, nn

from ttac.common.lookup import some
from ttac.common.options import Checked, check_value, setting
from ttac.model.architectures import architectures
from ttac.model.classifier import Classifier
from ttac.model.heads import evaluating, find_head
from ttac.model.tensors import check_finite, read_tensors, write_tensors

PICKLED = (".pt", ".pth", ".bin")
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


@dataclass(frozen=True)
class LoadedModel:
    """A classifier and the description that it can be saved with."""

    classifier: Classifier
    description: ModelDescription


def save_model(path: Path | str, network: nn.Module, description: ModelDescription) -> None:
    """Write the weights and their description as a safetensors file, atomically."""
    write_tensors(path, network.state_dict(), {METADATA_KEY: description.text()})


def classifier_of(
    network: nn.Module,
    description: ModelDescription,
    *,
    head: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    device: str = "cpu",
) -> LoadedModel:
    """Make a classifier on a device, and complete the description by what the classifier finds out."""
    classifier = Classifier(
        network.to(usable_device(device)).eval(),
        head or description.head,
        mean=mean if mean is not None else description.mean,
        std=std if std is not None else description.std,
    )
    return LoadedModel(classifier, description.of(classifier))


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
    path: Path, arch: str | None = None, num_classes: int | None = None, head: str | None = None
) -> tuple[nn.Module, ModelDescription]:
    """Read a file of weights into a network; what is given here wins over what the file says of itself."""
    weights, described = _read(path)
    if described is not None and described.arch != (arch or described.arch):
        described = dataclasses.replace(described, arch_options={})
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
    head = head or (described.head if described is not None else None)
    # Checked before a network of that size is made: a forged number would ask for more memory than there is.
    most_rows = max((len(tensor) for tensor in weights.values() if tensor.ndim), default=0)
    if num_classes is not None and num_classes > most_rows:
        raise ValueError(f"the weights in {path} are of fewer than {num_classes} classes")
    problems = []
    options = described.arch_options if described is not None else {}
    channels = described.channels if described is not None else None
    for origin, build in architectures(arch, channels=channels, options=options, weights=weights):
        network = build(num_classes)
        if num_classes is None and (rows := weights.get(f"{find_head(network, head)}.weight")) is not None:
            network = build(len(rows))  # of the head, one for each class
        problem = misfit(network, weights)
        if problem is None:
            network.load_state_dict(weights, strict=False)  # old files lack batch norm's num_batches_tracked
            # 1 stands in: `load_model` reads the number of classes off the classifier.
            return network, dataclasses.replace(described or ModelDescription(arch, 1), arch=arch)
        problems.append(f"{arch} of {origin}: {problem}")
    raise ValueError(f"the weights in {path} do not fit {'; '.join(problems)}")


def _read(path: Path) -> tuple[dict[str, Tensor], ModelDescription | None]:
    """Read weights without ever unpickling objects."""
    described = None
    if path.suffix == ".safetensors":
        content: Any
        content, notes = read_tensors(path)
        if METADATA_KEY in notes:
            try:
                described = ModelDescription.parse(notes[METADATA_KEY])
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    elif path.suffix in PICKLED:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged or forged file fails wherever it likes
            raise ValueError(
                f"{path} is damaged, or holds more than weights and was not loaded, because that could run code: "
                f"save model.state_dict() alone, best as safetensors ({_first_line(error)})"
            ) from error
    else:
        raise ValueError(f"{path}: weights are read from .safetensors, {', '.join(PICKLED)} files")
    return _plain_weights(content, path), described


def _plain_weights(content: Any, path: Path) -> dict[str, Tensor]:
    """Take the state dict out of usual wrappers, and what wrapped the model out of its names."""
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{path} holds no state dict (name: tensor); save model.state_dict()")
    odd = [str(name) for name, value in content.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if odd:
        raise ValueError(f"{path} holds more than tensors ({some(odd, 3)}); save model.state_dict()")
    weights: dict[str, Tensor] = dict(content)
    for prefix in ("module.", "_orig_mod."):  # of DataParallel and of torch.compile
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    check_finite(weights, path)
    return weights


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
