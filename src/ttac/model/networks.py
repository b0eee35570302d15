"""Networks for 32 x 32 images: residual ones, with the names that torchvision uses, and a vision transformer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Callable[[int], nn.Module]


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm = nn.BatchNorm2d) -> nn.Module:
    """Lead the input past a block, as it is where it has the output's shape."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut: `[N, C, H, W] -> [N, C', H / stride, W / stride]`."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample = _shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + self.downsample(x))


def _basic_stage(inputs: int, outputs: int, blocks: int, stride: int, norm: Norm = nn.BatchNorm2d) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride, norm)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1, norm) for _ in range(blocks - 1)))


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
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        blocks, remainder = divmod(depth - 2, 6)
        if remainder or blocks < 1:
            raise ValueError(f"depth must be 6 n + 2 with n >= 1 (8, 14, 20, 26, ...), not {depth}")
        self.conv1 = nn.Conv2d(channels, width, 3, stem_stride, 1, bias=False)
        self.bn1 = norm(width)
        self.layer1 = _basic_stage(width, width, blocks, 1, norm)
        self.layer2 = _basic_stage(width, 2 * width, blocks, 2, norm)
        self.layer3 = _basic_stage(2 * width, 4 * width, blocks, 2, norm)
        self.fc = nn.Linear(4 * width, num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class ResNet18(nn.Module):
    """The residual network of 18 layers with a 3 x 3 stem and no pooling after it: features of width `8 * width`.

    >>> sum(parameter.numel() for parameter in ResNet18(10, width=32).parameters())
    2797610
    """

    def __init__(self, num_classes: int, *, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _basic_stage(width, width, 2, 1)
        self.layer2 = _basic_stage(width, 2 * width, 2, 2)
        self.layer3 = _basic_stage(2 * width, 4 * width, 2, 2)
        self.layer4 = _basic_stage(4 * width, 8 * width, 2, 2)
        self.fc = nn.Linear(8 * width, num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions with a shortcut: `[N, C, H, W] -> [N, 4 width, H / stride, W / stride]`."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        inner = F.relu(self.bn2(self.conv2(inner)))
        return F.relu(self.bn3(self.conv3(inner)) + self.downsample(x))


class ResNet50(nn.Module):
    """The residual network of 50 layers with a 3 x 3 stem and no pooling after it: features of width 2048.

    >>> sum(parameter.numel() for parameter in ResNet50(10).parameters())
    23520842
    """

    def __init__(self, num_classes: int, *, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = self._stage(64, 64, 3, 1)
        self.layer2 = self._stage(256, 128, 4, 2)
        self.layer3 = self._stage(512, 256, 6, 2)
        self.layer4 = self._stage(1024, 512, 3, 2)
        self.fc = nn.Linear(2048, num_classes)
        _initialise(self)

    @staticmethod
    def _stage(inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
        first = Bottleneck(inputs, width, stride)
        return nn.Sequential(first, *(Bottleneck(Bottleneck.expansion * width, width, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def _initialise(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class TransformerBlock(nn.Module):
    """Self-attention and a perceptron of twice the width, each after a norm and beside a shortcut: `[N, T, D]`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        count, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).reshape(count, tokens, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [N, heads, T, D / heads] each
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)
        x = x + self.proj(attended)
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """A small vision transformer on 8 x 8 patches of 4 x 4 pixels; the class token is the feature of width `width`.

    >>> VisionTransformer(10, width=24, depth=1)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    side = 32
    patch = 4
    heads = 12

    def __init__(self, num_classes: int, *, channels: int = 3, width: int = 192, depth: int = 9) -> None:
        super().__init__()
        if width % self.heads:
            raise ValueError(f"width must be a multiple of the {self.heads} attention heads, not {width}")
        self.patch_embed = nn.Conv2d(channels, width, self.patch, self.patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + (self.side // self.patch) ** 2, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, self.heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (self.side, self.side):
            size = " x ".join(map(str, x.shape[-2:]))
            raise RuntimeError(f"this network takes images of {self.side} x {self.side}, not {size}")
        patches = self.patch_embed(x).flatten(2).mT  # [N, 64, D]
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(tokens))[:, 0])
