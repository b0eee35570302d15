"""`ttac stats`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ttac.common.options import Checked, setting
from ttac.evaluation.spec import ModelSpec

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class CollectJob(Checked):
    """Collect statistics from source images, in one subfolder for each class or without any."""

    model: ModelSpec = setting(without=("channels_last", "autocast"))
    images: Path = setting(help="images, also in subfolders")
    out: Path = setting(help="statistics to write", output="file")
    batch: int = setting(64, "images that arrive at a time", least=1)
    family: str | None = setting(None, "full, low-rank, diagonal or isotropic (default: the richest that fits)")
    group_by: Literal["auto", "label", "prediction"] = setting("auto", "by subfolder, if there are, or prediction")


@dataclass(frozen=True)
class InferJob(Checked):
    """Infer statistics from the weights of the model's head."""

    model: ModelSpec = setting(without=("size", "classes", "channels_last", "autocast"))
    out: Path = setting(help="statistics to write", output="file")


def collect(job: CollectJob, console: Console) -> None:
    """Collect statistics from a folder of source images."""
    import torch

    from ttac.data.folder import FolderStream, labels_by_subfolder, list_images
    from ttac.source.statistics import SourceStatistics

    loaded = job.model.load()
    loaded.tell(console)
    classifier, description = loaded.classifier, loaded.description
    files = list_images(job.images)
    unreadable: list[str] = []

    def report(name: str, reason: str) -> None:
        unreadable.append(name)
        sys.stderr.write(f"skipped {name}: {reason}\n")

    stream = FolderStream(
        job.images, files, job.batch, description.size, classifier.channels, description.crop_pct, report
    )
    group_by = job.group_by
    if group_by == "auto":
        group_by = "label" if any("/" in name for name in files) else "prediction"
    labels = labels_by_subfolder(files, classifier.num_classes, description.classes) if group_by == "label" else {}
    loader = (
        (images, torch.tensor([labels[name] for name in names])) if labels else images for images, names in stream
    )
    stats = SourceStatistics.collect(classifier, loader, group_by=group_by, family=job.family)
    stats.save(job.out)
    counts = stats.origin.counts
    print(
        f"{job.out}: {stats.origin.samples} images, {min(counts)} to {max(counts)} in each of {len(counts)} classes "
        f"by {group_by}, {stats.classes.covariance.family} covariances, {len(stats.depths)} depths, "
        f"{len(unreadable)} unreadable"
    )


def infer(job: InferJob, console: Console) -> None:
    """Infer statistics from the head."""
    from ttac.source.statistics import SourceStatistics

    loaded = job.model.load()
    loaded.tell(console)
    stats = SourceStatistics.infer(loaded.classifier)
    stats.save(job.out)
    classes, features = stats.classes.mean.shape
    print(f"{job.out}: {classes} classes and {features} features, inferred from the head (source-free)")
