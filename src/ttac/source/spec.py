"""Models by name, and how one is trained; command lines are made of it, so nothing here imports torch at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ttac.common.files import read_lines
from ttac.common.lookup import let_own_networks_be_imported
from ttac.common.options import Checked, read_value, setting
from ttac.data.fields import data_setting

if TYPE_CHECKING:
    from ttac.model.weights import LoadedModel
    from ttac.source.objectives import Objective

Amp = Literal["auto", "off", "bf16", "fp16"]


@dataclass(frozen=True)
class ModelSpec(Checked):
    """A model by what a user calls it, what is known of it, and how it is run."""

    model: str = setting(
        help="bundle of ttac train; weights (safetensors, pt, pth, pth.tar, ckpt, bin); name of timm, hf_hub:NAME, "
        "torchvision's NAME:WEIGHTS; id or folder of Hugging Face"
    )
    arch: str | None = setting(None, "network of the weights: of ttac, timm, torchvision, module or file.py:callable")
    trust_pickle: bool = setting(False, "run what a pickled model holds, which can be any code")
    head: str | None = setting(None, "dotted name of the final linear layer (default: found)")
    mean: tuple[float, ...] | None = setting(None, "pixel mean by channel, of images in [0, 1]")
    std: tuple[float, ...] | None = setting(None, "pixel standard deviation by channel")
    size: int | None = setting(None, "side to resize and crop image files to (default: the model's)", least=1)
    classes: Path | None = setting(None, "class names, one a line (default: the model's)")
    device: str = setting("cpu", "cpu, cuda, ...")
    channels_last: bool = setting(False, "memory layout of the weights, for convolutions of many channels")
    autocast: Literal["bfloat16"] | None = setting(None, "precision of forward passes, where processors have it")

    def load(self) -> LoadedModel:
        """Load the model."""
        from ttac.model.pixels import UnknownPixelsError
        from ttac.model.speed import Speed
        from ttac.source.loading import load_model

        let_own_networks_be_imported(self.arch)
        given = {name: getattr(self, name) for name in ("arch", "head", "mean", "std", "device", "trust_pickle")}
        try:
            loaded = load_model(self.model, speed=Speed(self.channels_last, self.autocast), **given)
        except UnknownPixelsError as error:
            raise error.as_options() from error
        description = loaded.description
        if self.size is not None:
            description = dataclasses.replace(description, size=(self.size, self.size))
        if self.classes is not None:
            description = dataclasses.replace(description, classes=read_lines(self.classes))
        return dataclasses.replace(loaded, description=description)


@dataclass(frozen=True)
class Recipe(Checked):
    """How long and how fast to train: SGD with momentum and a one-cycle rate."""

    epochs: int = setting(30, "passes over the data", least=1)
    batch: int = setting(128, "images a step", least=1)
    lr: float = setting(0.1, "peak of the one-cycle rate", above=0)
    weight_decay: float = setting(5e-4, least=0)
    flip: bool = setting(True, "a mirrored image is not of its class")
    strong: float = setting(0.0, "share of each batch under strong views (RandAugment)", least=0, most=1)
    seed: int = setting(0, "of everything random", least=0)


@dataclass(frozen=True, kw_only=True)
class TrainJob(Checked):
    """Train a source model into a bundle; the same command goes on after a stop, bit for bit."""

    data: str = data_setting()
    out: Path = setting(help="folder for the trained model", output="folder")
    arch: str | None = setting(None, "network: of ttac, timm, torchvision, or module:callable")
    init: str | None = setting(None, "model to start from; its arch is the default")
    objective: Literal["ce", "ce+contrastive", "ce+rotation", "poly"] = setting("ce", "what is minimised")
    options: Mapping[str, Any] = setting(make=dict, help="number for the network or the objective", option="set")
    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    val: float | None = setting(None, "share to validate on (default: the test part, or 0.1)", least=0, below=1)
    val_data: str | None = setting(None, "validate on data of their own")
    size: int | None = setting(None, "side to resize and crop image files to (default: as they are)", least=1)
    classes: Path | None = setting(None, "class names, one a line (default: the subfolders)")
    mean: tuple[float, ...] | None = setting(None, "pixel mean by channel (default: of the training images)")
    std: tuple[float, ...] | None = setting(None, "pixel standard deviation by channel (default: likewise)")
    stats: bool = setting(False, "collect source statistics into the bundle too")
    device: str = setting("cpu", "cpu, cuda, ...")
    amp: Amp = setting("auto", "mixed precision; auto: on CUDA, where it pays")
    channels_last: bool = setting(False, "memory layout of the weights, for convolutions of many channels")
    checkpoint_every: float = setting(120.0, "seconds; 0: after every batch", least=0)

    def check(self) -> None:
        """Refuse what contradicts itself."""
        if self.arch is None and self.init is None:
            raise ValueError("name the network with --arch, or a model to start from with --init")
        if self.init is not None and self.arch_options:
            raise ValueError("options of the network are those of the model to start from: leave them out")
        if self.val is not None and self.val_data is not None:
            raise ValueError("validation images are a share of the training images or data of their own, not both")

    @property
    def loss(self) -> Objective:
        """What is minimised, with those of the options that it has.

        >>> job = TrainJob(out=Path("b"), arch="resnet8", objective="poly", options={"epsilon": "2", "width": 8})
        >>> job.loss, job.arch_options
        (Poly(epsilon=2.0), {'width': 8})
        """
        from ttac.source.objectives import make_objective

        return make_objective(self.objective, **self._numbers(of_objective=True))

    @property
    def arch_options(self) -> dict[str, int]:
        """The options that are not of the objective, and so of the network."""
        options = self._numbers(of_objective=False)
        for key, number in options.items():
            if not isinstance(number, int):
                raise ValueError(f"--set {key}={number}: options of networks are whole numbers")
        return options

    def _numbers(self, of_objective: bool) -> dict[str, Any]:
        from ttac.source.objectives import OBJECTIVES

        known = {field.name for field in dataclasses.fields(OBJECTIVES[self.objective])}
        return {key: _number(key, word) for key, word in self.options.items() if (key in known) == of_objective}


def _number(key: str, word: object) -> float:
    number = read_value(word, float)
    if not isinstance(number, float):
        raise ValueError(f"--set wants key=number, not '{key}={word}'")
    return int(number) if number.is_integer() else number
