"""`ttac stats`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from ttac.cli.common import add_image_arguments, add_model_arguments, load_chosen_model, new_parser


def collect_parser() -> ArgumentParser:
    """Describe `ttac stats collect`."""
    parser = new_parser("Collect statistics from source images, in one subfolder for each class or without any.")
    add_model_arguments(parser)
    add_image_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="statistics to write")
    add(
        "--family",
        type=str,
        metavar="NAME",
        help="full, low-rank, diagonal or isotropic (default: the richest that fits)",
    )
    add(
        "--group-by",
        type=Literal["auto", "label", "prediction"],
        default="auto",
        metavar="HOW",
        help="label (class subfolder), prediction, or auto: by label if there are subfolders (default: %(default)s)",
    )
    return parser


def infer_parser() -> ArgumentParser:
    """Describe `ttac stats infer`."""
    parser = new_parser("Infer statistics from the weights of the model's head.")
    add_model_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="statistics to write")
    return parser


def collect_command(chosen: Namespace) -> int:
    """Collect statistics from a folder of source images."""
    import torch

    from ttac.data.folder import FolderStream, labels_by_subfolder, list_images
    from ttac.source.statistics import SourceStatistics

    loaded = load_chosen_model(chosen)
    classifier, description = loaded.classifier, loaded.description
    files = list_images(chosen.images)
    unreadable: list[str] = []

    def report(name: str, reason: str) -> None:
        unreadable.append(name)
        sys.stderr.write(f"skipped {name}: {reason}\n")

    stream = FolderStream(
        chosen.images,
        files,
        chosen.batch,
        description.size,
        classifier.channels,
        description.crop_pct,
        report,
    )
    group_by = chosen.group_by
    if group_by == "auto":
        group_by = "label" if any("/" in name for name in files) else "prediction"
    labels = labels_by_subfolder(files, classifier.num_classes, description.classes) if group_by == "label" else {}
    loader = (
        (images, torch.tensor([labels[name] for name in names])) if labels else images for images, names in stream
    )
    stats = SourceStatistics.collect(classifier, loader, group_by=group_by, family=chosen.family)
    stats.save(chosen.out)
    counts = stats.origin.counts
    print(
        f"{chosen.out}: {stats.origin.samples} images, {min(counts)} to {max(counts)} in each of {len(counts)} classes "
        f"by {group_by}, {stats.classes.covariance.family} covariances, {len(unreadable)} unreadable"
    )
    return 0


def infer_command(chosen: Namespace) -> int:
    """Infer statistics from the head."""
    from ttac.source.statistics import SourceStatistics

    loaded = load_chosen_model(chosen)
    stats = SourceStatistics.infer(loaded.classifier)
    stats.save(chosen.out)
    classes, features = stats.classes.mean.shape
    print(f"{chosen.out}: {classes} classes and {features} features, inferred from the head (source-free)")
    return 0
