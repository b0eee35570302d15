"""Models by what a user calls them: a bundle, a file of weights, or the name of a pretrained network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ttac.common.lookup import suggestion
from ttac.model.architectures import optional_package
from ttac.model.speed import Speed
from ttac.model.weights import PICKLED, LoadedModel, ModelDescription, classifier_of, read_weights, save_model
from ttac.source.bundle import load_bundle

__all__ = ["LoadedModel", "ModelDescription", "load_model", "save_model"]


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
    path = Path(model)
    if path.is_dir():
        given = {"num_classes": num_classes, "--head": head, "--mean": mean, "--std": std}
        odd = [name for name, value in given.items() if value is not None]
        if odd:
            raise ValueError(f"{model} is a bundle, which says these itself: leave {', '.join(odd)} out")
        loaded: LoadedModel = load_bundle(path, arch=arch, device=device)
    else:
        network, description = read_weights(path, arch, num_classes, head) if path.is_file() else _named(model, arch)
        loaded = classifier_of(network, description, head=head, mean=mean, std=std, device=device)
    if speed is None or speed == Speed():
        return loaded
    return dataclasses.replace(loaded, classifier=loaded.classifier.tuned(**vars(speed)))


def _named(name: str, arch: str | None) -> tuple[nn.Module, ModelDescription]:
    """Get the pretrained timm model of a name, or say what was meant where it looks like a file's."""
    path = Path(name)
    if path.suffix in (".safetensors", *PICKLED) or len(path.parts) > 1 or name.endswith("/"):
        raise FileNotFoundError(f"no model file {name}" + (", nor a bundle" if not path.suffix else ""))
    if arch is not None:
        raise FileNotFoundError(f"no model file {name}: --arch goes with a file of weights")
    timm, problem = optional_package("timm")
    if timm is None:
        raise ValueError(f"no model file {name}, and it cannot be looked up as a timm name: {problem}")
    if not timm.is_model(name):
        raise ValueError(f"no model file {name}, and no timm model of that name{suggestion(name, timm.list_models())}")
    try:
        network = timm.create_model(name, pretrained=True)
    except Exception as error:  # of several network libraries, with no base in common
        raise ValueError(
            f"the weights of {name} could not be had: {error}. Without a network, use --model FILE --arch {name}"
        ) from error
    config = timm.data.resolve_model_data_config(network, use_test_size=True)
    _, height, width = config["input_size"]
    return network, ModelDescription(name, network.num_classes, size=(height, width), crop_pct=config["crop_pct"])
