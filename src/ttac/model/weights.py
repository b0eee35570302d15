"""Weight files that say what they hold, and classifiers from them; nothing in a file is ever run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ttac.common.files import replacing
from ttac.model.architectures import architectures
from ttac.model.classifier import Classifier
from ttac.model.heads import evaluating, find_head

PICKLED = (".pt", ".pth", ".bin")
METADATA_KEY = "ttac"  # alone, because safetensors writes several keys in random order


@dataclass(frozen=True)
class ModelDescription:
    """What weights need to be used: their network, and the images that it takes.

    >>> ModelDescription.parse(ModelDescription("resnet20", 10, size=(32, 32)).text()).size
    (32, 32)
    """

    arch: str
    num_classes: int
    channels: int = 3
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    size: tuple[int, int] | None = None  # height, width
    classes: tuple[str, ...] | None = None
    crop_pct: float = 1.0
    head: str | None = None
    arch_options: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, not {self.num_classes}")
        if self.classes is not None and len(self.classes) != self.num_classes:
            raise ValueError(f"there are {len(self.classes)} class names for {self.num_classes} classes")
        # Here and below, the bound keeps a forged file from asking for more memory than there is.
        if not 1 <= self.channels <= 256:
            raise ValueError(f"channels must be in 1..256, not {self.channels}")
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"size must be positive, not {self.size}")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct must be in (0, 1], not {self.crop_pct}")
        if not all(math.isfinite(value) for value in (*(self.mean or ()), *(self.std or ()))):
            raise ValueError(f"mean and std must be finite, not {self.mean} and {self.std}")
        if not all(1 <= value <= 256 for value in self.arch_options.values()):
            raise ValueError(f"arch_options must be in 1..256, not {dict(self.arch_options)}")

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
    # Cloned, because safetensors refuses weights that share memory.
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in network.state_dict().items()}
    with replacing(path) as draft:
        save_file(weights, draft, {METADATA_KEY: description.text()})


def load_weights(
    path: Path,
    *,
    arch: str | None = None,
    num_classes: int | None = None,
    head: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    device: str = "cpu",
) -> LoadedModel:
    """Load a file of weights; what is given here wins over what the file says of itself."""
    network, description = _from_file(path, arch, num_classes, head)
    return classifier_of(network, description, head=head, mean=mean, std=std, device=device)


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
        image = torch.zeros(1, classifier.channels, *size, device=classifier.mean.device)
        with evaluating(classifier), torch.no_grad():
            classifier(image)
    except (RuntimeError, AssertionError, TypeError, OverflowError) as error:  # the last two: no size of a tensor
        reason = _first_line(error)
        raise ValueError(f"the model does not take {size[0]} x {size[1]} images ({reason}): set --size") from error


def _from_file(
    path: Path, arch: str | None, num_classes: int | None, head: str | None
) -> tuple[nn.Module, ModelDescription]:
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
        if num_classes is None and (found := _head_rows(network, head, weights)) is not None:
            network = build(found)
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
        try:
            with safe_open(path, "pt") as file:
                text = (file.metadata() or {}).get(METADATA_KEY)
                content: Any = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        if text is not None:
            try:
                described = ModelDescription.parse(text)
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
        raise ValueError(f"{path} holds more than tensors ({', '.join(odd[:3])}); save model.state_dict()")
    weights: dict[str, Tensor] = dict(content)
    for prefix in ("module.", "_orig_mod."):  # of DataParallel and of torch.compile
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    bad = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
    if bad:
        raise ValueError(f"{path}: NaN or infinity in {', '.join(bad[:3])}")
    return weights


def _head_rows(network: nn.Module, head: str | None, weights: Mapping[str, Tensor]) -> int | None:
    """Read the number of classes off the weights of the head."""
    weight = weights.get(f"{find_head(network, head)}.weight")
    return None if weight is None else len(weight)


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
    parts = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in lists.items()
        if names
    ]
    return ", ".join(parts) or None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:200]
