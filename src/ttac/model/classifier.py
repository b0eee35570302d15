"""Any `nn.Module` as a backbone and a linear head, fed with raw images in [0, 1]."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence

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
    pretrained_config,
)
from ttac.model.inputs import check_images
from ttac.model.speed import Precision, Speed, compiled_pass, plain_pass


class Classifier(nn.Module):
    """A network as `features(x): [N, C, H, W] -> [N, D]` and `logits(z): [N, D] -> [N, K]`.

    `mean` and `std` normalise pixels inside; without them timm's `pretrained_cfg` is asked, and a model that has none
    is taken to want raw [0, 1] pixels. Images have as many channels as `mean` and `std` given here, else as the first
    convolution takes. `head` is the dotted name of the final linear layer, found where it is not given. `branch` is the
    auxiliary head that the network was trained with, if any; nothing here uses it but methods that ask for it.

    >>> clf = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)), head="3")
    >>> clf.features(torch.rand(5, 3, 2, 2)).shape, clf(torch.rand(5, 3, 2, 2)).shape
    (torch.Size([5, 8]), torch.Size([5, 3]))
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        model: nn.Module,
        head: str | None = None,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        branch: Branch | None = None,
    ) -> None:
        super().__init__()
        if isinstance(model, Classifier):
            raise TypeError("this is a ttac.Classifier already: use it as it is")
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a torch.nn.Module, not {type(model).__name__}")
        self.model = model
        self.head_name = find_head(model, head)
        self.branch = branch
        config = pretrained_config(model)
        # timm's mean keeps three values whatever `in_chans` is, and the first convolution may see patches of pixels.
        by_hand = _channels_of(mean, std)
        mean = mean if mean is not None else config.get("mean")
        std = std if std is not None else config.get("std")
        self._channels = by_hand or input_channels(model) or _channels_of(mean, std)
        self._register_pixels("mean", mean, 0.0)
        self._register_pixels("std", std, 1.0)
        if not bool((self.std > 0).all()):
            raise ValueError(f"std must be positive, not {self.std.flatten().tolist()}")
        self._takes_raw_pixels = not bool(self.mean.any()) and bool((self.std == 1).all())
        self.speed = Speed()
        self._verified = False

    def _register_pixels(self, name: str, values: Sequence[float] | None, default: float) -> None:
        numbers = [default] if values is None else [float(value) for value in values]
        if len(numbers) not in (1, self._channels):
            raise ValueError(
                f"{name} has {len(numbers)} values where {self._channels} channels are expected: "
                "pass mean and std with one value for each channel of an image"
            )
        device = first_parameter(self.model).device
        pixels = torch.tensor(numbers, dtype=torch.float32, device=device).reshape(1, -1, 1, 1)
        self.register_buffer(name, pixels, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Classifier:
        """Move `mean` and `std` with the model, but keep them in float32: a cast to bfloat16 would round them."""
        exact = (self.mean, self.std)
        super()._apply(fn, recurse)
        self.mean, self.std = (tensor.to(self.mean.device) for tensor in exact)
        return self

    @property
    def head(self) -> nn.Linear:
        """The final linear layer."""
        head = self.model.get_submodule(self.head_name)
        assert isinstance(head, nn.Linear)
        return head

    @property
    def channels(self) -> int:
        """C, the number of image channels, 3 where neither `mean` and `std` nor a convolution tell it."""
        return self._channels or 3

    @property
    def num_classes(self) -> int:
        """K, the number of classes."""
        return self.head.out_features

    @property
    def feature_dim(self) -> int:
        """D, the width of the head's input."""
        return self.head.in_features

    def features(self, images: Tensor) -> Tensor:
        """Compute the head's input of raw images in [0, 1]: `[N, C, H, W] -> [N, D]`."""
        return self._run(images)[0]

    def logits(self, features: Tensor) -> Tensor:
        """Apply the head alone: `[N, D] -> [N, K]`."""
        logits: Tensor = self.head(features)
        return logits

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of raw images in [0, 1]: `[N, C, H, W] -> [N, K]`."""
        if torch.is_grad_enabled() or not self._verified or self.speed.compile:
            return self._run(images)[1]
        # Predictions go without the hook, whose fixed time is felt at small batches.
        with self.speed.precision(self.mean.device):
            output = output_logits(self.model(self._pixels(images)))
        return self._widened(output)

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute both in one pass: `[N, C, H, W] -> [N, D], [N, K]`."""
        return self._run(images)

    def _run(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if not self._verified and self.speed.autocast is not None:
            self._verify_in_full_precision(images[:1])
        pixels = self._pixels(images)
        seen: list[Tensor] = []
        # The hook lives for this call alone, so a copy of the model never carries a hook of the original.
        handle = self.head.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        run = compiled_pass if self.speed.compile else plain_pass
        try:
            with self.speed.precision(self.mean.device):
                captured, found = run(self.model, seen, pixels)
        finally:
            handle.remove()
        output = output_logits(found)
        if len(captured) != 1:
            raise HeadError(
                f"the head {self.head_name!r} runs {len(captured)} times in a forward pass; it must run once"
            )
        if not self._verified and len(output):
            self._verify(captured[0], output)
        return self._widened(captured[0]), self._widened(output)

    def _pixels(self, images: Tensor) -> Tensor:
        """Normalise images into memory of their own, as a network may write to its input."""
        dtype = first_parameter(self.model).dtype
        if self._takes_raw_pixels:
            return images.to(dtype, copy=True)
        return (images - self.mean).div_(self.std).to(dtype)

    def _widened(self, output: Tensor) -> Tensor:
        """Undo what autocast has narrowed: losses, statistics and filters are computed in the head's precision."""
        return output if self.speed.autocast is None else output.to(self.head.weight.dtype)

    def _verify_in_full_precision(self, image: Tensor) -> None:
        """Verify the head without autocast, which is too coarse to tell a wrong one."""
        speed, self.speed = self.speed, Speed()
        try:
            with evaluating(self), torch.no_grad():
                self._run(image)
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
            # Relative to the largest logit: a fixed tolerance would let any layer pass where all logits are small.
            rtol = 1e-4 if output.dtype in (torch.float32, torch.float64) else 5e-2
            atol = rtol * float(output.nan_to_num().abs().max())
        if again.shape != output.shape or not torch.allclose(again, output, rtol, atol, equal_nan=True):
            raise HeadError(
                f"the output of {self.head_name!r} is not the model's output (something follows it, or another layer "
                "is the head): name the final layer with head=..."
            )
        self._verified = True

    def check(self, images: Tensor) -> Tensor:
        """Return `images` on this device and in one precision, or raise an error that says what is wrong with them."""
        wide = torch.float64 if self.head.weight.dtype == torch.float64 else torch.float32
        return check_images(images, self._channels).to(self.mean.device, wide)

    def backbone_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters but those of the head and the branch, by name."""
        # By identity: torch.compile renames parameters, and a head may be registered under two names.
        heads = {value for head in (self.head, self.branch) if head is not None for value in head.parameters()}
        return {name: value for name, value in self.named_parameters() if value not in heads}

    def fingerprint(self) -> str:
        """Hash the weights, the head's name and the pixel normalisation, the same on every device; not the branch.

        >>> a, b = nn.Linear(4, 2), nn.Linear(4, 2)
        >>> Classifier(nn.Sequential(a)).fingerprint() == Classifier(nn.Sequential(b)).fingerprint()
        False
        """
        digest = hashlib.sha256(self.head_name.encode())
        tensors = {**self.model.state_dict(), "pixels.mean": self.mean, "pixels.std": self.std}
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()[:32]

    def copy(self) -> Classifier:
        """Make an independent copy, weights and all."""
        return copy.deepcopy(self)

    def tuned(
        self, *, channels_last: bool = False, autocast: Precision | None = None, compile: bool = False
    ) -> Classifier:
        """Make a copy with the same weights that runs faster where the hardware is made for it; see docs/speed.md.

        `channels_last` lays the weights out for convolutions of many channels; `autocast="bfloat16"` computes forward
        passes in that precision, for processors with the instructions; `compile` has torch compile the network, for
        each mode in its first pass.

        >>> clf = Classifier(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 2)))
        >>> clf.tuned(channels_last=True).fingerprint() == clf.fingerprint()
        True
        """
        speed = Speed(channels_last, autocast, compile)
        speed.check(self.model, self.mean.device)
        copied = self.copy()
        copied.speed = speed
        return copied.to(memory_format=torch.channels_last) if channels_last else copied  # type: ignore[call-overload]


def _channels_of(*vectors: Sequence[float] | None) -> int | None:
    """The longest of some means and standard deviations, None where none has a value for each channel."""
    return max((len(vector) for vector in vectors if vector is not None and len(vector) > 1), default=None)
