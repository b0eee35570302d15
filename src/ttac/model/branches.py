"""Auxiliary heads that source training may add to a classifier, and their self-supervised losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttac.model.tensors import hash_tensors

BranchKind = Literal["contrastive", "rotation"]


class Branch(nn.Module, ABC):
    """A head on the features `[N, D]` beside the classifier's own, with a loss that needs no labels."""

    kind: ClassVar[BranchKind]

    @abstractmethod
    def forward(self, features: Tensor) -> Tensor:
        """Map features `[N, D]` to the branch's own space `[N, P]`."""


class ContrastiveBranch(Branch):
    """A projection whose directions tell samples apart and keep two views of one sample together (SimCLR, TTT++).

    >>> [round(length, 3) for length in ContrastiveBranch(64)(torch.rand(3, 64)).norm(dim=1).tolist()]
    [1.0, 1.0, 1.0]
    """

    kind = "contrastive"
    temperature = 0.5

    def __init__(self, feature_dim: int, projection_dim: int = 128) -> None:
        super().__init__()
        self.hidden = nn.Linear(feature_dim, feature_dim)
        self.projection = nn.Linear(feature_dim, projection_dim)

    def forward(self, features: Tensor) -> Tensor:
        """Project features to the unit sphere: `[N, D] -> [N, P]`."""
        return F.normalize(self.projection(F.relu(self.hidden(features))), dim=1)

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        """Compute the normalised-temperature cross-entropy of two views' projections, `[N, P]` each."""
        both = torch.cat([first, second])
        similarity = (both @ both.mT / self.temperature).float()
        itself = torch.eye(len(both), dtype=torch.bool, device=both.device)
        partner = torch.arange(len(both), device=both.device).roll(len(first))
        return F.cross_entropy(similarity.masked_fill(itself, -torch.inf), partner)


class RotationBranch(Branch):
    """A linear head that tells by which of four quarter turns an image was rotated (TTT).

    >>> RotationBranch(64)(torch.rand(3, 64)).shape
    torch.Size([3, 4])
    """

    kind = "rotation"

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        self.turns = nn.Linear(feature_dim, 4)

    def forward(self, features: Tensor) -> Tensor:
        """Score the four turns: `[N, D] -> [N, 4]`."""
        return self.turns(features)


BRANCHES: dict[str, type[ContrastiveBranch] | type[RotationBranch]] = {
    branch.kind: branch for branch in (ContrastiveBranch, RotationBranch)
}


def fingerprint(branch: Branch) -> str:
    """Hash the kind and the weights, the same on every device.

    >>> fingerprint(RotationBranch(4)) == fingerprint(RotationBranch(4))
    False
    """
    return hash_tensors(branch.kind, branch.state_dict())


def rotate(images: Tensor, turns: Tensor) -> Tensor:
    """Turn each square image by its number of quarter turns: `[N, C, S, S]`, `[N] -> [N, C, S, S]`.

    >>> rotate(torch.arange(4.0).reshape(1, 1, 2, 2), torch.tensor([1])).flatten()
    tensor([1., 3., 0., 2.])
    """
    if images.shape[-1] != images.shape[-2]:
        size = " x ".join(map(str, images.shape[-2:]))
        raise ValueError(f"only square images can be turned by 90 degrees, not {size}: crop them")
    rotated = images.clone()
    for count in (1, 2, 3):
        chosen = turns == count
        rotated[chosen] = images[chosen].rot90(count, (2, 3))
    return rotated
