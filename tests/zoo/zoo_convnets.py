"""Classifiers of pictures built from plain and residual convolutions."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_random import seeded


class LeNet5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5)
        self.conv2 = nn.Conv2d(8, 12, 5)
        self.fc1 = nn.Linear(12 * 4 * 4, 24)
        self.fc2 = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(-1, 12 * 4 * 4)
        return self.fc2(F.dropout(F.relu(self.fc1(x)), training=self.training))


class VGG(nn.Module):
    def __init__(self, plan: Sequence[int | str], classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for entry in plan:
            if entry == "M":
                layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
            else:
                layers += [nn.Conv2d(channels, int(entry), 3, padding=1), nn.BatchNorm2d(int(entry)), nn.ReLU(True)]
                channels = int(entry)
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(channels * 4, 24),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(24, 24),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(24, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        x = torch.flatten(x, 1)
        return self.classifier(x)


def conv3x3(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, groups=groups, bias=False)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = conv3x3(inputs, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = conv3x3(planes, planes, stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, planes * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """The network for ImageNet: a wide first convolution with max pooling, then four stages."""

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int], width: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        self.inplanes = width
        self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = self._make_layer(block, width, depths[0])
        self.layer2 = self._make_layer(block, width * 2, depths[1], stride=2)
        self.layer3 = self._make_layer(block, width * 4, depths[2], stride=2)
        self.layer4 = self._make_layer(block, width * 8, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width * 8 * block.expansion, classes)

    def _make_layer(
        self, block: type[BasicBlock] | type[Bottleneck], planes: int, depth: int, stride: int = 1
    ) -> nn.Sequential:
        downsample = None
        outputs = planes * block.expansion
        if stride != 1 or self.inplanes != outputs:
            downsample = nn.Sequential(
                nn.Conv2d(self.inplanes, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )
        layers = [block(self.inplanes, planes, stride, downsample)]
        self.inplanes = outputs
        layers += [block(outputs, planes) for _ in range(1, depth)]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


class CifarBlock(nn.Module):
    """A basic block that writes its shortcut as a module, empty where there is nothing to do."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv3x3(inputs, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class PaddedBlock(CifarBlock):
    """The shortcut without parameters: every second pixel, and channels of zeros on both sides."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__(inputs, planes, stride)
        self.shortcut = nn.Identity()
        self.extra, self.stride = (planes - inputs) // 2, stride

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.stride != 1:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra, self.extra), "constant", 0)
        out += self.shortcut(x)
        return F.relu(out)


class PreActBlock(nn.Module):
    """Normalised and activated before each convolution; used by the wide networks too."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv3x3(inputs, planes, stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.dropout = nn.Dropout(p=0.3)
        self.conv2 = conv3x3(planes, planes)
        if stride != 1 or inputs != planes:
            self.shortcut = nn.Conv2d(inputs, planes, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(self.dropout(F.relu(self.bn2(out))))
        return out + shortcut


class CifarResNet(nn.Module):
    """Three stages behind a small convolution; what is normalised last depends on the block."""

    def __init__(
        self,
        block: type[CifarBlock] | type[PreActBlock],
        depth: int,
        width: int = 16,
        widen: int = 1,
        classes: int = 10,
    ) -> None:
        super().__init__()
        blocks, self.preact = (depth - 2) // 6, block is PreActBlock
        self.inplanes = width
        self.conv1 = conv3x3(3, width)
        self.layer1 = self._stage(block, width * widen, blocks, 1)
        self.layer2 = self._stage(block, 2 * width * widen, blocks, 2)
        self.layer3 = self._stage(block, 4 * width * widen, blocks, 2)
        self.bn = nn.BatchNorm2d(self.inplanes if self.preact else width)
        self.linear = nn.Linear(self.inplanes, classes)

    def _stage(self, block: type[CifarBlock] | type[PreActBlock], planes: int, blocks: int, stride: int) -> nn.Module:
        layers = []
        for step in [stride] + [1] * (blocks - 1):
            layers.append(block(self.inplanes, planes, step))
            self.inplanes = planes
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        if not self.preact:
            out = F.relu(self.bn(out))
        out = self.layer1(out)
        out = self.layer2(out)
        out = self.layer3(out)
        if self.preact:
            out = F.relu(self.bn(out), inplace=True)
        out = F.avg_pool2d(out, out.size()[3])
        out = out.view(out.size(0), -1)
        return self.linear(out)


class RegBlock(nn.Module):
    """A bottleneck without a waist and with grouped convolutions, followed by squeeze and excite."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True))
        self.b = nn.Sequential(conv3x3(outputs, outputs, stride, groups), nn.BatchNorm2d(outputs), nn.ReLU(True))
        self.se = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(outputs, 6, 1), nn.ReLU(True), nn.Conv2d(6, outputs, 1), nn.Sigmoid()
        )
        self.c = nn.Sequential(nn.Conv2d(outputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.proj: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.proj = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.b(self.a(x))
        out = self.c(out * self.se(out))
        return F.relu_(self.proj(x) + out)


@seeded()
def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 10)
    )


@seeded()
def lenet5() -> nn.Module:
    return LeNet5()


@seeded(1.5)
def vgg_bn() -> nn.Module:
    return VGG([8, 8, "M", 12, 12, "M", 16, 16, "M", 24, "M"])


@seeded(1.3)
def resnet18() -> nn.Module:
    return ResNet(BasicBlock, (2, 2, 2, 2), width=8, classes=10)


@seeded()
def resnet50() -> nn.Module:
    return ResNet(Bottleneck, (3, 4, 6, 3), width=4, classes=10)


@seeded()
def resnet_cifar(depth: int = 56, width: int = 8) -> nn.Module:
    return CifarResNet(CifarBlock, depth, width)


@seeded()
def resnet_padded() -> nn.Module:
    return CifarResNet(PaddedBlock, 14, 8)


@seeded()
def wide_resnet() -> nn.Module:
    return CifarResNet(PreActBlock, 14, 4, widen=3)


@seeded()
def preact_resnet() -> nn.Module:
    return CifarResNet(PreActBlock, 20, 8)


@seeded()
def regnet() -> nn.Module:
    stem = nn.Sequential(conv3x3(3, 16, 2), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    trunk = [RegBlock(16, 16, 1, 4), RegBlock(16, 32, 2, 4), RegBlock(32, 32, 1, 4)]
    return nn.Sequential(stem, *trunk, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
