"""A look at the first images of a stream, for pixels that a network was not trained on."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from ttac.model.classifier import Classifier
from ttac.model.heads import evaluating
from ttac.model.norms import batch_norms, own_statistics

LEAST, MOST = 16, 64  # images: fewer tell too little, more cost time
# Pixels that are not divided by a std of 0.2 to 0.35 leave first features 8 to 25 times less variance. Of the
# corruptions, contrast alone changes it as much; noise and blur stay within a factor of 2.
FACTOR = 8.0
MOVED = 0.5  # mean distance in total variation between what the head makes of both statistics


class PixelsWarning(UserWarning):
    """The first images look as if `mean` and `std` were wrong."""


def warn_of_pixels(classifier: Classifier, images: Tensor) -> None:
    """Warn where stored batch-norm statistics make nothing of `images [N, C, H, W]`, but those of the images do.

    Two passes over some of them, which change nothing; networks without batch norm and few images are not judged.
    """
    norms = batch_norms(classifier)
    if not norms or len(images) < LEAST:
        return
    images = classifier.check(images[:MOST])
    first, seen = norms[0], []
    assert first.running_var is not None
    with evaluating(classifier), torch.no_grad():
        handle = first.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        try:
            stored = classifier(images).float().softmax(1)
        finally:
            handle.remove()
        with own_statistics(norms):
            own = classifier(images).float().softmax(1)
    variance = seen[-1].float().transpose(0, 1).flatten(1).var(1)
    ratio = math.exp(float(((variance + first.eps) / (first.running_var.float() + first.eps)).log().median()))
    moved = float((stored - own).abs().sum(1).mean()) / 2
    if not 1 / FACTOR < ratio < FACTOR and moved > MOVED:
        mean, std = (_short(pixels) for pixels in (classifier.mean, classifier.std))
        warnings.warn(
            f"are mean and std right? Of the first {len(images)} images, the network's first features vary {ratio:.3g} "
            f"times as much as in training, and {100 * moved:.0f} % of its predictions hang on that. Pixels are "
            f"normalised by mean {mean} and std {std}; if those are of the network's training, the images are shifted "
            "very far, as by a loss of contrast",
            PixelsWarning,
            stacklevel=3,
        )


def _short(pixels: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in pixels.flatten().tolist())
