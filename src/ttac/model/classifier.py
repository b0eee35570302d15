"""Any `nn.Module` as a backbone and a linear head, fed with raw images in [0, 1]."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ttac.model.branches import Branch
from ttac.model.heads import (
    HeadError,
    evaluating,
    find_head,
    first_parameter,
    input_channels,
    output_logits,
    probe_logits,
    same_logits,
)
from ttac.model.inputs import ImageInput
from ttac.model.pixels import pixels_of
from ttac.model.pooled_head import PooledHead, head_of, pooled
from ttac.model.speed import Precision, Speed
from ttac.model.tensors import hash_tensors

NEED_LOGITS_ALONE = ("test", "bn", "tent", "conjugate")  # a test holds this to the registry


class Classifier(nn.Module):
    """A network as `features(x): [N, C, H, W] -> [N, D]` and `logits(z): [N, D] -> [N, K]`.

    `mean` and `std` normalise pixels inside, one number for all channels or one for each; without them timm's
    `pretrained_cfg` is asked, and a model that has none is refused: `mean=0, std=1` says that it takes raw pixels.
    Images have as many channels as `mean` and `std` given here, else as the first convolution takes.

    `head` is the dotted name of the final layer, found where it is not given: a linear one, or a 1 x 1 convolution
    whose output is averaged over positions. A model that has none can still be used by methods that need logits alone.
    `branch` is the auxiliary head that the network was trained with, if any; nothing here uses it but methods that ask
    for it.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> clf = Classifier(model, head="3", mean=0, std=1)
    >>> clf
    Classifier(Sequential, head '3': 8 features, 3 classes)
    >>> clf.features(torch.rand(5, 3, 2, 2)).shape, clf(torch.rand(5, 3, 2, 2)).shape
    (torch.Size([5, 8]), torch.Size([5, 3]))
    """

    def __init__(
        self,
        model: nn.Module,
        head: str | None = None,
        *,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        branch: Branch | None = None,
    ) -> None:
        super().__init__()
        if isinstance(model, Classifier):
            raise TypeError("this is a ttac.Classifier already: use it as it is")
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a torch.nn.Module, not {type(model).__name__}")
        self.model = model
        self.branch = branch
        self._headless: str | None = None  # why there is no linear head
        self._find_head(head)
        # timm's mean keeps three values whatever `in_chans` is, and the first convolution may see patches of pixels.
        by_hand = _channels_of(mean, std)
        mean, std = pixels_of(model, mean, std)
        channels = by_hand or input_channels(model) or _channels_of(mean, std)
        self.input = ImageInput(mean, std, channels, first_parameter(model).device)
        self.speed = Speed()
        self._verified = False

    def _find_head(self, head: str | None) -> None:
        try:
            self.head_name = find_head(self.model, head)
        except HeadError as error:
            if head is not None:
                raise
            try:
                logits = probe_logits(self.model)
            except HeadError:
                raise error from None
            self.head_name, self._headless, self._classes = "", str(error), logits.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.input.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        return first_parameter(self.model).dtype

    @property
    def head(self) -> nn.Linear | PooledHead:
        """The final layer; raises where there is none that is linear in features `[N, D]`."""
        if self._headless is not None:
            raise HeadError(
                "this needs a linear head, and the model has none: use a method that needs logits alone "
                f"({', '.join(NEED_LOGITS_ALONE)}). {self._headless}"
            )
        return head_of(self.model, self.head_name)

    @property
    def has_linear_head(self) -> bool:
        """Whether there are features and a linear layer on them, which anchors and frozen heads need."""
        return self._headless is None

    @property
    def mean(self) -> Tensor:
        """The pixel mean by channel: `[1, C, 1, 1]`."""
        return self.input.mean

    @property
    def std(self) -> Tensor:
        """The pixel standard deviation by channel: `[1, C, 1, 1]`."""
        return self.input.std

    @property
    def channels(self) -> int:
        """C, the number of image channels, 3 where neither `mean` and `std` nor a convolution tell it."""
        return self.input.channels or 3

    @property
    def num_classes(self) -> int:
        """K, the number of classes."""
        return self.head.out_features if self._headless is None else self._classes

    @property
    def feature_dim(self) -> int:
        """D, the width of the head's input."""
        return self.head.in_features

    def __repr__(self) -> str:
        name = type(self.model).__name__
        if self._headless is not None:
            return f"Classifier({name}, no linear head: {self.num_classes} classes)"
        return f"Classifier({name}, head {self.head_name!r}: {self.feature_dim} features, {self.num_classes} classes)"

    def features(self, images: Tensor) -> Tensor:
        """Compute the head's input of raw images in [0, 1]: `[N, C, H, W] -> [N, D]`."""
        return self.features_and_logits(images)[0]

    def logits(self, features: Tensor) -> Tensor:
        """Apply the head alone: `[N, D] -> [N, K]`."""
        return self.head(features)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of raw images in [0, 1]: `[N, C, H, W] -> [N, K]`."""
        if self._headless is None and (torch.is_grad_enabled() or not self._verified):
            return self.features_and_logits(images)[1]
        # Predictions go without the hook, whose fixed time is felt at small batches.
        with self.speed.precision(self.device):
            output = output_logits(self.model(self.input.normalise(images, self.dtype)))
        return self._widened(output)

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute both in one pass: `[N, C, H, W] -> [N, D], [N, K]`."""
        if not self._verified and self.speed.autocast is not None:
            self._verify_in_full_precision(images[:1])
        pixels = self.input.normalise(images, self.dtype)
        seen: list[Tensor] = []
        # The hook lives for this call alone, so a copy of the model never carries a hook of the original.
        head = self.head
        layer = head.layer if isinstance(head, PooledHead) else head
        handle = layer.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        try:
            with self.speed.precision(self.device):
                output = output_logits(self.model(pixels))
        finally:
            handle.remove()
        if len(seen) != 1:
            raise HeadError(f"the head {self.head_name!r} runs {len(seen)} times in a forward pass; it must run once")
        features = pooled(seen[0]) if isinstance(head, PooledHead) else seen[0]
        if not self._verified and len(output):
            self._verify(features, output)
        return self._widened(features), self._widened(output)

    def _widened(self, output: Tensor) -> Tensor:
        """Undo what autocast has narrowed: losses, statistics and filters are computed in the model's precision."""
        return output if self.speed.autocast is None else output.to(self.dtype)

    def _verify_in_full_precision(self, image: Tensor) -> None:
        """Verify the head without autocast, which is too coarse to tell a wrong one."""
        speed, self.speed = self.speed, Speed()
        try:
            with evaluating(self), torch.no_grad():
                self.features_and_logits(image)
        finally:
            self.speed = speed

    def _verify(self, features: Tensor, output: Tensor) -> None:
        """Make sure, once, that the head's output is the model's output."""
        if features.ndim != 2:
            raise HeadError(
                f"the head {self.head_name!r} gets an input of shape {tuple(features.shape)}; expected [N, D]. "
                "A head that scores every token or position is not supported"
            )
        with torch.no_grad():
            again = self.logits(features)
        if not same_logits(again, output):
            raise HeadError(
                f"the output of {self.head_name!r} is not the model's output (something follows it, or another layer "
                "is the head): name the final layer with head=..."
            )
        self._verified = True

    def check(self, images: Tensor) -> Tensor:
        """Return `images` on this device and in one precision, or raise an error that says what is wrong with them."""
        return self.input.check(images, torch.float64 if self.dtype == torch.float64 else torch.float32)

    def backbone_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters but those of the head, where there is a linear one, and of the branch, by name."""
        # By identity: torch.compile renames parameters, and a head may be registered under two names.
        heads = [self.branch, None if self._headless is not None else self.head]
        fixed = {value for head in heads if head is not None for value in head.parameters()}
        return {name: value for name, value in self.named_parameters() if value not in fixed}

    def fingerprint(self) -> str:
        """Hash the weights, the head's name and the pixel normalisation, the same on every device; not the branch.

        >>> a, b = nn.Linear(4, 2), nn.Linear(4, 2)
        >>> Classifier(nn.Sequential(a)).fingerprint() == Classifier(nn.Sequential(b)).fingerprint()
        False
        """
        tensors = {**self.model.state_dict(), "pixels.mean": self.mean, "pixels.std": self.std}
        return hash_tensors(self.head_name, tensors)

    def copy(self) -> Classifier:
        """Make an independent copy, weights and all."""
        return copy.deepcopy(self)

    def tuned(self, *, channels_last: bool = False, autocast: Precision | None = None) -> Classifier:
        """Make a copy with the same weights that runs faster where the hardware is made for it; see docs/speed.md.

        `channels_last` lays the weights out for convolutions of many channels; `autocast="bfloat16"` computes forward
        passes in that precision, for processors with the instructions.

        >>> clf = Classifier(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 2)), mean=0, std=1)
        >>> clf.tuned(channels_last=True).fingerprint() == clf.fingerprint()
        True
        """
        speed = Speed(channels_last, autocast)
        speed.check(self.model, self.device)
        copied = self.copy()
        copied.speed = speed
        return copied.to(memory_format=torch.channels_last) if channels_last else copied  # type: ignore[call-overload]


def _channels_of(*vectors: float | Sequence[float] | None) -> int | None:
    """The longest of some means and standard deviations, None where none has a value for each channel."""
    lengths = [torch.as_tensor(vector).numel() for vector in vectors if vector is not None]
    return max((length for length in lengths if length > 1), default=None)
