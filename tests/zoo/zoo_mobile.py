"""Classifiers of pictures built from depthwise and grouped convolutions, with gates and shuffles."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_random import seeded


def divisible(value: float, divisor: int = 4) -> int:
    """The nearest multiple of the divisor that is not more than a tenth smaller."""
    rounded = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


class ConvBNReLU(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = round(inputs * expand)
        self.use_res_connect = stride == 1 and inputs == outputs
        layers: list[nn.Module] = [] if expand == 1 else [ConvBNReLU(inputs, hidden, kernel=1)]
        layers += [
            ConvBNReLU(hidden, hidden, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.use_res_connect:
            return x + self.conv(x)
        return self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        features: list[nn.Module] = [ConvBNReLU(3, 8, stride=2)]
        channels = 8
        for expand, outputs, repeats, stride in ((1, 8, 1, 1), (4, 12, 2, 2), (4, 16, 2, 2)):
            for step in [stride] + [1] * (repeats - 1):
                features.append(InvertedResidual(channels, outputs, step, expand))
                channels = outputs
        features.append(ConvBNReLU(channels, 32, kernel=1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = x.mean([2, 3])
        return self.classifier(x)


class SqueezeExcite(nn.Module):
    """The third mobile network's: pooled by a function, closed by a hard sigmoid."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = divisible(channels / 4)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = F.adaptive_avg_pool2d(x, 1)
        scale = F.relu(self.fc1(scale), inplace=True)
        scale = F.hardsigmoid(self.fc2(scale), inplace=True)
        return scale * x


class MobileBlockV3(nn.Module):
    def __init__(
        self, inputs: int, hidden: int, outputs: int, kernel: int, stride: int, excite: bool, hard_swish: bool
    ) -> None:
        super().__init__()
        act = nn.Hardswish if hard_swish else nn.ReLU
        layers: list[nn.Module] = []
        if hidden != inputs:
            layers += [nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), act(inplace=True)]
        depthwise = nn.Conv2d(hidden, hidden, kernel, stride, kernel // 2, groups=hidden, bias=False)
        layers += [depthwise, nn.BatchNorm2d(hidden), act(inplace=True)]
        if excite:
            layers.append(SqueezeExcite(hidden))
        layers += [nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.block = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        result = self.block(x)
        if self.residual:
            result += x
        return result


class MobileNetV3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(inplace=True)),
            MobileBlockV3(8, 8, 8, 3, 1, excite=True, hard_swish=False),
            MobileBlockV3(8, 24, 12, 3, 2, excite=False, hard_swish=False),
            MobileBlockV3(12, 32, 12, 3, 1, excite=False, hard_swish=False),
            MobileBlockV3(12, 32, 16, 5, 2, excite=True, hard_swish=True),
            MobileBlockV3(16, 40, 16, 5, 1, excite=True, hard_swish=True),
            nn.Sequential(nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32), nn.Hardswish(inplace=True)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(32, 24), nn.Hardswish(inplace=True), nn.Dropout(p=0.2, inplace=True), nn.Linear(24, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


class DropPath(nn.Module):
    """Stochastic depth: in training, whole samples skip the branch."""

    def __init__(self, drop: float = 0.1) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        if self.drop == 0.0 or not self.training:
            return x
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.drop)
        return x * mask.div_(1 - self.drop)


class MBConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, expand: int, kernel: int, stride: int) -> None:
        super().__init__()
        hidden = inputs * expand
        self.expand = expand != 1
        if self.expand:
            self.conv_pw = nn.Conv2d(inputs, hidden, 1, bias=False)
            self.bn0 = nn.BatchNorm2d(hidden, eps=1e-3)
        self.conv_dw = nn.Conv2d(hidden, hidden, kernel, stride, kernel // 2, groups=hidden, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden, eps=1e-3)
        self.conv_reduce = nn.Conv2d(hidden, max(1, inputs // 4), 1)
        self.conv_expand = nn.Conv2d(max(1, inputs // 4), hidden, 1)
        self.conv_pwl = nn.Conv2d(hidden, outputs, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs, eps=1e-3)
        self.drop_path = DropPath()
        self.has_skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.expand:
            x = F.silu(self.bn0(self.conv_pw(x)), inplace=True)
        x = F.silu(self.bn1(self.conv_dw(x)), inplace=True)
        x_se = x.mean((2, 3), keepdim=True)
        x_se = self.conv_expand(F.silu(self.conv_reduce(x_se), inplace=True))
        x = x * x_se.sigmoid()
        x = self.bn2(self.conv_pwl(x))
        if self.has_skip:
            x = self.drop_path(x) + shortcut
        return x


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU(inplace=True))
        self.blocks = nn.Sequential(
            MBConv(8, 8, 1, 3, 1), MBConv(8, 12, 4, 3, 2), MBConv(12, 12, 4, 3, 1), MBConv(12, 16, 4, 5, 2)
        )
        self.head = nn.Sequential(nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU(inplace=True))
        self.classifier = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.blocks(self.stem(x)))
        x = F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1)
        x = F.dropout(x, p=0.2, training=self.training)
        return self.classifier(x)


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    batch, channels, height, width = x.size()
    x = x.view(batch, groups, channels // groups, height, width)
    x = torch.transpose(x, 1, 2).contiguous()
    return x.reshape(batch, -1, height, width)


class ShuffleUnitV2(nn.Module):
    """Half of the channels pass by; with a stride both halves are computed, from all channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, half = stride, outputs // 2
        if stride > 1:
            self.branch1 = nn.Sequential(
                nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
                nn.BatchNorm2d(inputs),
                nn.Conv2d(inputs, half, 1, bias=False),
                nn.BatchNorm2d(half),
                nn.ReLU(inplace=True),
            )
        self.branch2 = nn.Sequential(
            nn.Conv2d(inputs if stride > 1 else half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
            nn.Conv2d(half, half, 3, stride, 1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            nn.Conv2d(half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            x1, x2 = x.chunk(2, dim=1)
            out = torch.cat((x1, self.branch2(x2)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        return channel_shuffle(out, 2)


class ShuffleNetV2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.stage2 = nn.Sequential(ShuffleUnitV2(8, 16, 2), ShuffleUnitV2(16, 16, 1), ShuffleUnitV2(16, 16, 1))
        self.stage3 = nn.Sequential(ShuffleUnitV2(16, 24, 2), ShuffleUnitV2(24, 24, 1))
        self.conv5 = nn.Sequential(nn.Conv2d(24, 32, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv5(self.stage3(self.stage2(self.conv1(x))))
        x = x.mean([2, 3])
        return self.fc(x)


class ShuffleUnitV1(nn.Module):
    """Grouped pointwise convolutions with a shuffle between; with a stride the input is concatenated, not added."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int = 4) -> None:
        super().__init__()
        self.stride, self.groups = stride, groups
        new = outputs - inputs if stride == 2 else outputs
        waist = outputs // 4 * 2
        self.gconv1 = nn.Conv2d(inputs, waist, 1, groups=groups, bias=False)
        self.bn1 = nn.BatchNorm2d(waist)
        self.dwconv = nn.Conv2d(waist, waist, 3, stride, 1, groups=waist, bias=False)
        self.bn2 = nn.BatchNorm2d(waist)
        self.gconv2 = nn.Conv2d(waist, new, 1, groups=groups, bias=False)
        self.bn3 = nn.BatchNorm2d(new)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.gconv1(x)))
        out = channel_shuffle(out, self.groups)
        out = self.bn3(self.gconv2(self.bn2(self.dwconv(out))))
        if self.stride == 2:
            return F.relu(torch.cat([F.avg_pool2d(x, 3, stride=2, padding=1), out], 1))
        return F.relu(x + out)


@seeded(1.4)
def mobilenet_v2() -> nn.Module:
    return MobileNetV2()


@seeded(1.4)
def mobilenet_v3() -> nn.Module:
    return MobileNetV3()


@seeded(1.5)
def efficientnet() -> nn.Module:
    return EfficientNet()


@seeded(1.4)
def shufflenet_v2() -> nn.Module:
    return ShuffleNetV2()


@seeded(1.5)
def shufflenet_v1() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    trunk = [ShuffleUnitV1(8, 16, 2), ShuffleUnitV1(16, 16, 1), ShuffleUnitV1(16, 32, 2), ShuffleUnitV1(32, 32, 1)]
    return nn.Sequential(stem, *trunk, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(32, 10))
