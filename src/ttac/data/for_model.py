"""Data that a model is tried on, as it takes them."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from ttac.data.classes import in_order_of
from ttac.data.labelled import LabelledImages
from ttac.data.sets import DataSet


class TakesImages(Protocol):
    """What is known of a model that images are read for, be it here (`ModelDescription`) or behind a server."""

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width."""

    @property
    def channels(self) -> int:
        """Of an image."""

    @property
    def crop_pct(self) -> float:
        """Share of an image file's side that is left when it is cropped."""

    @property
    def num_classes(self) -> int:
        """Of the head."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Their names by number, where it has them."""


def read_for(
    model: TakesImages, found: DataSet, split: str | None, *, domain: str | None = None, severity: int | None = None
) -> LabelledImages:
    """Read a part of a data set with the size and channels that the model takes, and labels in its class order."""
    data = found.read(
        split,
        domain=domain,
        severity=severity,
        size=model.size,
        channels=model.channels,
        crop_pct=model.crop_pct,
        classes=model.classes if found.spec is None else None,  # a folder need not have images of every class
    )
    if found.spec is not None:
        data, _ = in_order_of(model.classes, data, None)
    if data.channels != model.channels:
        raise ValueError(f"the images have {data.channels} channels, the model takes {model.channels}")
    # Labels without names are the model's own numbers, of which the last ones may be missing.
    if data.num_classes > model.num_classes or (data.classes is not None and data.num_classes < model.num_classes):
        hint = ": name those of the model with --classes" if model.classes is None else ""
        raise ValueError(f"the data have {data.num_classes} classes, the model has {model.num_classes}{hint}")
    return dataclasses.replace(data, num_classes=model.num_classes)
