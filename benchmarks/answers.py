"""What answers of a server must be: those of the version that they name, and of a version that is new enough."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from load import Sent
from numpy.typing import NDArray

from ttac.serving.state_folder import StateFolder
from ttac.source.loading import load_model

TOLERANCE = 1e-4  # of logits, which other batch sizes round differently
LATEST = 1.0  # seconds after which a published version answers


def logits_by_version(model: Path, state: Path, images: NDArray[np.uint8]) -> dict[int, NDArray[np.float32]]:
    """Compute the logits of all images `[n, K]` with the weights of each version on disk, oldest first."""
    folder, classifier = StateFolder(state), load_model(str(model)).classifier
    pixels = torch.from_numpy(images).float() / 255
    found = {}
    for version in folder.versions():
        classifier.model.load_state_dict(folder.load_version(version))
        with torch.no_grad():
            found[version] = classifier(pixels).numpy()
    return found


def check_logits(sent: Sequence[Sent], logits: dict[int, NDArray[np.float32]]) -> tuple[int, int, float]:
    """Count answers that are not of their version, and those that a neighbouring one would explain; largest error."""
    neighbours: dict[int, list[int]] = {version: [] for version in logits}
    for before, after in pairwise(logits):
        neighbours[before].append(after)
        neighbours[after].append(before)

    def error(one: Sent, version: int) -> float:
        return float(np.abs(one.logits - logits[version][one.image]).max())

    wrong = unclear = 0
    largest = 0.0
    for one in sent:
        if one.version not in logits or error(one, one.version) > TOLERANCE:
            wrong += 1
            continue
        largest = max(largest, error(one, one.version))
        unclear += any(error(one, other) <= TOLERANCE for other in neighbours[one.version])
    return wrong, unclear, largest


def older_than_published(sent: Sequence[Sent], published: Iterable[tuple[float, int]]) -> list[Sent]:
    """Give the answers of versions before the newest of those `published` (time, version) long before the request."""
    times, versions = _newest_by(published)
    return [one for one in sent if one.version < versions[bisect_right(times, one.began - LATEST)]]


def older_than_answered(sent: Sequence[Sent]) -> list[Sent]:
    """Give the answers of versions before one that had been answered when their request began."""
    times, versions = _newest_by((one.done, one.version) for one in sent)
    return [one for one in sent if one.version < versions[bisect_left(times, one.began)]]


def _newest_by(moments: Iterable[tuple[float, int]]) -> tuple[list[float], list[int]]:
    """Give times in order, and the newest version before each of them and after the last one."""
    ordered = sorted(moments)
    return [time for time, _ in ordered], list(accumulate((version for _, version in ordered), max, initial=0))
