"""Models by what a user calls them: a bundle, a file of weights, or the name of a pretrained network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ttac.model.architectures import close_names, optional_package
from ttac.model.speed import Speed
from ttac.model.weights import (
    METADATA_KEY,
    PICKLED,
    LoadedModel,
    ModelDescription,
    classifier_of,
    load_weights,
    save_model,
)
from ttac.source.bundle import load_bundle

__all__ = ["METADATA_KEY", "LoadedModel", "ModelDescription", "load_model", "save_model"]


def load_model(
    model: str,
    *,
    arch: str | None = None,
    num_classes: int | None = None,
    head: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    device: str = "cpu",
    speed: Speed | None = None,
) -> LoadedModel:
    """Load a bundle folder (as a `Bundle`), a weights file, or the pretrained timm model of that name.

    A file's architecture is `arch`, or what `save_model` wrote into it: a network of this package
    (`architectures.OWN`), "package.module:callable", a timm name or a torchvision name. What is given here wins over
    what the file says; a bundle is taken as it is. `speed` says how the model is run, see `Classifier.tuned`.
    """
    loaded = _load(model, arch, num_classes, head, mean, std, device)
    if speed is None or speed == Speed():
        return loaded
    return dataclasses.replace(loaded, classifier=loaded.classifier.tuned(**vars(speed)))


def _load(
    model: str,
    arch: str | None,
    num_classes: int | None,
    head: str | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    device: str,
) -> LoadedModel:
    path = Path(model)
    if path.is_file():
        return load_weights(path, arch=arch, num_classes=num_classes, head=head, mean=mean, std=std, device=device)
    if path.is_dir():
        given = {"num_classes": num_classes, "--head": head, "--mean": mean, "--std": std}
        odd = [name for name, value in given.items() if value is not None]
        if odd:
            raise ValueError(f"{model} is a bundle, which says these itself: leave {', '.join(odd)} out")
        return load_bundle(path, arch=arch, device=device)
    if path.suffix in (".safetensors", *PICKLED) or len(path.parts) > 1 or model.endswith("/"):
        raise FileNotFoundError(f"no model file {model}" + (", nor a bundle" if not path.suffix else ""))
    if arch is not None:
        raise FileNotFoundError(f"no model file {model}: --arch goes with a file of weights")
    network, description = _pretrained(model)
    return classifier_of(network, description, head=head, mean=mean, std=std, device=device)


def _pretrained(name: str) -> tuple[nn.Module, ModelDescription]:
    timm, problem = optional_package("timm")
    if timm is None:
        raise ValueError(f"no model file {name}, and it cannot be looked up as a timm name: {problem}")
    if not timm.is_model(name):
        raise ValueError(f"no model file {name}, and no timm model of that name{close_names(name, timm)}")
    try:
        network = timm.create_model(name, pretrained=True)
    except Exception as error:  # of several network libraries, with no base in common
        raise ValueError(
            f"the weights of {name} could not be had: {error}. Without a network, use --model FILE --arch {name}"
        ) from error
    config = timm.data.resolve_model_data_config(network, use_test_size=True)
    _, height, width = config["input_size"]
    return network, ModelDescription(name, network.num_classes, size=(height, width), crop_pct=config["crop_pct"])
