"""What a batch of images must be, said before anything is changed."""

from __future__ import annotations

import torch
from torch import Tensor

# Interpolation overshoots a little; images in 0..255 or already normalised are far outside.
SLACK = 0.25


def check_images(images: Tensor, channels: int | None) -> Tensor:
    """Return `images [N, C, H, W]` as they are, or raise an error that says what is wrong and what to do.

    `channels` None leaves their number to the model.

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
    if channels is not None and images.shape[1] != channels:
        raise ValueError(
            f"images have {images.shape[1]} channels; the model takes {channels}, by the mean and std that "
            "ttac.Classifier was given or else by its first convolution"
        )
    if images.numel() == 0:
        raise ValueError(f"the batch is empty (shape {tuple(images.shape)}); pass at least one image")
    low, high = torch.stack(torch.aminmax(images)).tolist()
    if not (low > -float("inf") and high < float("inf")):  # aminmax propagates NaN, and NaN fails both
        bad = (~images.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        raise ValueError(
            f"images contain NaN or infinity (batch index {', '.join(map(str, bad[:5]))}); drop those images"
        )
    if low < -SLACK or high > 1 + SLACK:
        hint = (
            "Do not normalise them: mean and std belong in ttac.Classifier(model, mean=..., std=...)"
            if low < 0
            else "Divide 8-bit values by 255"
        )
        raise ValueError(f"pixel values span [{low:.3g}, {high:.3g}]; expected raw pixels in [0, 1]. {hint}")
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
