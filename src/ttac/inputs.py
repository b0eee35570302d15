"""What a batch of images must be, said before anything is changed."""

from __future__ import annotations

import torch
from torch import Tensor

# Interpolation overshoots a little; images in 0..255 or already normalised are far outside.
SLACK = 0.25


def check_images(images: Tensor, channels: int) -> Tensor:
    """Return `images [N, C, H, W]` as they are, or raise an error that says what is wrong and what to do.

    >>> check_images(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), 3)
    Traceback (most recent call last):
    TypeError: images are torch.uint8; expected floating point in [0, 1]: use images.float() / 255
    """
    if not isinstance(images, Tensor):
        raise TypeError(f"images are {type(images).__name__}; expected a torch.Tensor of shape [N, C, H, W]")
    if images.ndim != 4:
        hint = ": add the batch dimension with images[None]" if images.ndim == 3 else ""
        raise ValueError(f"images have shape {tuple(images.shape)}; expected [N, C, H, W]{hint}")
    if not images.is_floating_point():
        hint = ": use images.float() / 255" if images.dtype == torch.uint8 else ""
        raise TypeError(f"images are {images.dtype}; expected floating point in [0, 1]{hint}")
    if len(images) == 0:
        raise ValueError("the batch is empty; pass at least one image")
    if images.shape[1] != channels:
        raise ValueError(f"images have {images.shape[1]} channels; the model takes {channels}")
    low, high = (value.item() for value in torch.aminmax(images))
    if not (low > -float("inf") and high < float("inf")):  # aminmax propagates NaN, and NaN fails both
        bad = (~images.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        raise ValueError(
            f"images contain NaN or infinity (batch index {', '.join(map(str, bad[:5]))}); drop those images"
        )
    if low < -SLACK or high > 1 + SLACK:
        raise ValueError(
            f"pixel values span [{low:.3g}, {high:.3g}]; expected raw pixels in [0, 1]. Do not normalise them: "
            "mean and std belong in ttac.Classifier(model, mean=..., std=...)"
        )
    return images


def check_labels(labels: object, count: int, num_classes: int) -> Tensor:
    """Return labels as an integer tensor `[count]`, or raise an error that says what is wrong.

    >>> check_labels([0, 1], count=2, num_classes=2)
    tensor([0, 1])
    """
    labels = torch.as_tensor(labels)
    if labels.is_floating_point() or labels.shape != (count,):
        shape = tuple(labels.shape)
        raise ValueError(f"labels are {labels.dtype} of shape {shape}; expected integers of shape ({count},)")
    if count and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(f"labels must be in 0..{num_classes - 1}; got {int(labels.min())}..{int(labels.max())}")
    return labels.long()
