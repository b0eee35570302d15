"""Small residual networks for 32 x 32 images, written with the names that torchvision uses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut: `[N, C, H, W] -> [N, C', H / stride, W / stride]`."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + self.downsample(x))


class ResNet(nn.Module):
    """A CIFAR-style residual network of depth `6 n + 2` with a 3 x 3 stem and features of width `4 * width`.

    >>> ResNet(8, num_classes=10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        depth: int,
        num_classes: int,
        *,
        channels: int = 3,
        width: int = 16,
        stem_stride: int = 1,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        blocks, remainder = divmod(depth - 2, 6)
        if remainder or blocks < 1:
            raise ValueError(f"depth must be 6 n + 2 with n >= 1 (8, 14, 20, 26, ...), not {depth}")
        self.conv1 = nn.Conv2d(channels, width, 3, stem_stride, 1, bias=False)
        self.bn1 = norm(width)
        self.layer1 = self._stage(width, width, blocks, 1, norm)
        self.layer2 = self._stage(width, 2 * width, blocks, 2, norm)
        self.layer3 = self._stage(2 * width, 4 * width, blocks, 2, norm)
        self.fc = nn.Linear(4 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _stage(inputs: int, outputs: int, blocks: int, stride: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
        first = BasicBlock(inputs, outputs, stride, norm)
        return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1, norm) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
