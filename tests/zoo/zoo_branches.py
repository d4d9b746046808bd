"""Networks that concatenate, upsample and normalise by channel: dense, inception, ConvNeXt, U-Nets, generators."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_random import seeded


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int, bottleneck: int = 2) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, bottleneck * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(bottleneck * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        out = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu2(self.norm2(out)))


class DenseBlock(nn.ModuleDict):
    def __init__(self, layers: int, inputs: int, growth: int) -> None:
        super().__init__()
        for i in range(layers):
            self.add_module(f"denselayer{i + 1}", DenseLayer(inputs + i * growth, growth))

    def forward(self, init: Tensor) -> Tensor:
        features = [init]
        for _, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.pool = nn.AvgPool2d(2, 2)


class DenseNet(nn.Module):
    def __init__(self, growth: int = 6, layers: tuple[int, ...] = (3, 3, 2)) -> None:
        super().__init__()
        channels = 2 * growth
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, channels, 3, padding=1, bias=False))
        for i, count in enumerate(layers):
            self.features.add_module(f"denseblock{i + 1}", DenseBlock(count, channels, growth))
            channels += count * growth
            if i != len(layers) - 1:
                self.features.add_module(f"transition{i + 1}", Transition(channels, channels // 2))
                channels //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.features(x), inplace=True)
        out = torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1)
        return self.classifier(out)


class BasicConv2d(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int], padding: int | tuple[int, int] = 0):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Inception(nn.Module):
    def __init__(self, inputs: int, pool: int) -> None:
        super().__init__()
        self.branch1 = BasicConv2d(inputs, 6, 1)
        self.branch2 = nn.Sequential(BasicConv2d(inputs, 5, 1), BasicConv2d(5, 8, 3, padding=1))
        self.branch3 = nn.Sequential(
            BasicConv2d(inputs, 4, 1),
            BasicConv2d(4, 6, (1, 5), padding=(0, 2)),
            BasicConv2d(6, 7, (5, 1), padding=(2, 0)),
        )
        self.branch_pool = BasicConv2d(inputs, pool, 1)

    def _forward(self, x: Tensor) -> list[Tensor]:
        pooled = F.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
        return [self.branch1(x), self.branch2(x), self.branch3(x), self.branch_pool(pooled)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self._forward(x), 1)


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of a picture, by permuting there and back."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-6 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)  # N, C, H, W -> N, H, W, C
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return shortcut + x


class ConvNeXt(nn.Module):
    def __init__(self, dims: tuple[int, ...] = (8, 12, 16), depths: tuple[int, ...] = (1, 2, 1)) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, dims[0], kernel_size=2, stride=2), LayerNorm2d(dims[0], eps=1e-6))
        self.stages = nn.ModuleList()
        self.downsample_layers = nn.ModuleList()
        for i, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
            self.stages.append(nn.Sequential(*[ConvNeXtBlock(dim) for _ in range(depth)]))
            if i + 1 < len(dims):
                down = nn.Sequential(LayerNorm2d(dim, eps=1e-6), nn.Conv2d(dim, dims[i + 1], 2, stride=2))
                self.downsample_layers.append(down)
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = nn.Linear(dims[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, stage in enumerate(self.stages):
            x = stage(x)
            if i < len(self.downsample_layers):
                x = self.downsample_layers[i](x)
        return self.head(self.norm(x.mean([-2, -1])))


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, groups: int = 0) -> None:
        super().__init__()
        norms = [nn.GroupNorm(groups, outputs) if groups else nn.BatchNorm2d(outputs) for _ in range(2)]
        self.double_conv = nn.Sequential(
            nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=bool(groups)),
            norms[0],
            nn.SiLU() if groups else nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=bool(groups)),
            norms[1],
            nn.SiLU() if groups else nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class Up(nn.Module):
    """Twice the size, learned or bilinear, padded to the skip's size and concatenated with it."""

    def __init__(self, inputs: int, outputs: int, groups: int, bilinear: bool) -> None:
        super().__init__()
        if bilinear:
            self.up: nn.Module = nn.Sequential(
                nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), nn.Conv2d(inputs, outputs, 1)
            )
        else:
            self.up = nn.ConvTranspose2d(inputs, outputs, kernel_size=2, stride=2)
        self.conv = DoubleConv(2 * outputs, outputs, groups)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = self.up(x1)
        dy, dx = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, groups: int = 0, bilinear: bool = False) -> None:
        super().__init__()
        self.inc = DoubleConv(3, 8, groups)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 12, groups))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(12, 16, groups))
        self.up1 = Up(16, 12, groups, bilinear)
        self.up2 = Up(12, 8, groups, bilinear)
        self.outc = nn.Conv2d(8, 2, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x = self.down2(x2)
        x = self.up1(x, x2)
        return self.outc(self.up2(x, x1))


class SuperResolution(nn.Module):
    """Sub-pixel convolution, added to the bilinearly enlarged input."""

    def __init__(self, upscale: int = 2) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 16, 5, padding=2)
        self.body = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1), nn.PReLU(16), nn.Conv2d(16, 16, 3, padding=1), nn.LeakyReLU(0.2, True)
        )
        self.up = nn.Sequential(nn.Conv2d(16, 12 * upscale**2, 3, padding=1), nn.PixelShuffle(upscale), nn.ReLU())
        self.tail = nn.Conv2d(12, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        shallow = F.relu(self.head(x))
        out = self.tail(self.up(shallow + self.body(shallow)))
        return out + F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


class Generator(nn.Module):
    def __init__(self, latent: int = 12, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.fc = nn.Linear(latent, width * 4 * 4 * 4)
        self.main = nn.Sequential(
            nn.BatchNorm2d(width * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(width * 4, width * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(width * 2, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 3, 3, 1, 1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        x = self.fc(z).view(z.size(0), self.width * 4, 4, 4)
        return self.main(x)


class FeaturePyramid(nn.Module):
    """Three stages, brought to one width and added from the top down; segmentation and box maps out of each level."""

    def __init__(self, widths: tuple[int, ...] = (8, 12, 16), out: int = 12) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        channels = 3
        for width in widths:
            conv = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
            self.stages.append(nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)))
            channels = width
        self.inner_blocks = nn.ModuleList([nn.Conv2d(width, out, 1) for width in widths])
        self.layer_blocks = nn.ModuleList([nn.Conv2d(out, out, 3, padding=1) for _ in widths])
        self.mask = nn.Conv2d(out, 5, 1)
        self.boxes = nn.Conv2d(out, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        inner = self.inner_blocks[-1](features[-1])
        levels = [self.layer_blocks[-1](inner)]
        for i in range(len(features) - 2, -1, -1):
            lateral = self.inner_blocks[i](features[i])
            inner = lateral + F.interpolate(inner, size=lateral.shape[-2:], mode="nearest")
            levels.insert(0, self.layer_blocks[i](inner))
        size = levels[0].shape[-2:]
        merged = sum(F.interpolate(level, size, mode="bilinear", align_corners=False) for level in levels)
        found = {f"boxes{i}": self.boxes(F.relu(level)) for i, level in enumerate(levels)}
        return {"out": self.mask(merged), **found}


@seeded(1.6)
def densenet() -> nn.Module:
    return DenseNet()


@seeded(1.5)
def inception() -> nn.Module:
    stem = [BasicConv2d(3, 8, 3, padding=1), nn.MaxPool2d(2, ceil_mode=True), Inception(8, 4), Inception(25, 5)]
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Dropout(0.2), nn.Linear(26, 10))


@seeded()
def convnext() -> nn.Module:
    return ConvNeXt()


@seeded()
def unet() -> nn.Module:
    return UNet()


@seeded()
def unet_groupnorm() -> nn.Module:
    return UNet(groups=4)


@seeded()
def unet_bilinear() -> nn.Module:
    return UNet(bilinear=True)


@seeded()
def superres() -> nn.Module:
    return SuperResolution()


@seeded()
def gan_generator() -> nn.Module:
    return Generator()


@seeded()
def seg_fpn() -> nn.Module:
    return FeaturePyramid()
