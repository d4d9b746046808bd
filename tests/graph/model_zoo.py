"""Models whose groups can be told by hand, with what the analysis must say of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class G:
    """A group as it must be found; axes are written `tensor[dim]`, separated by spaces."""

    size: int
    unit: str
    members: str
    producers: str
    consumers: str


@dataclass(frozen=True)
class Case:
    """A model, its example inputs, and what must be found: groups, and frozen axes as (axis, operation, module)."""

    name: str
    make: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    groups: Mapping[str, G]
    frozen: frozenset[tuple[str, str, str]] = frozenset()
    kwargs: Callable[[], dict[str, Any]] = dict
    units: str = "structured"

    def __str__(self) -> str:
        return self.name


def norm(name: str) -> str:
    """The axes of a batch norm."""
    return " ".join(f"{name}.{tensor}[0]" for tensor in ("weight", "bias", "running_mean", "running_var"))


@torch.library.custom_op("prunus_tests::swirl", mutates_args=())
def swirl(x: Tensor) -> Tensor:
    return x.flip(1) + x


@swirl.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Net(nn.Module):
    """Layers by name, and a function that uses them."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Swirl(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return swirl(x)


class Standardised(nn.Conv2d):
    """A convolution with a computed weight."""

    def forward(self, input: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(input, self.weight - mean, self.bias, padding=1)


class Branching(nn.Module):
    """It branches on a tensor's values: nothing that can be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y) if y.sum() > 0 else self.b(-y)


def images(channels: int = 3, side: int = 8, batch: int = 2) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(batch, channels, side, side, generator=torch.Generator().manual_seed(1)),)


def vectors(features: int = 6, batch: int = 3) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(batch, features, generator=torch.Generator().manual_seed(1)),)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 4))


def lenet() -> nn.Module:
    return Net(
        lambda m, x: m.fc2(
            F.relu(m.fc1(torch.flatten(F.max_pool2d(m.conv2(F.max_pool2d(m.conv1(x).relu(), 2)).relu(), 2), 1)))
        ),
        conv1=nn.Conv2d(1, 6, 5),
        conv2=nn.Conv2d(6, 7, 5),
        fc1=nn.Linear(7 * 16, 9),
        fc2=nn.Linear(9, 4),
    )


def residual() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.bn0(m.stem(x)).relu()
        y = m.bn2(m.conv2(m.bn1(m.conv1(x)).relu_()))
        return m.head(F.adaptive_avg_pool2d((x + y).relu(), 1).flatten(1))

    return Net(
        forward,
        stem=nn.Conv2d(3, 6, 3, padding=1, bias=False),
        bn0=nn.BatchNorm2d(6),
        conv1=nn.Conv2d(6, 5, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(5),
        conv2=nn.Conv2d(5, 6, 3, padding=1, bias=False),
        bn2=nn.BatchNorm2d(6),
        head=nn.Linear(6, 4),
    )


def mobile() -> nn.Module:
    return Net(
        lambda m, x: m.head(m.project(F.relu6(m.bn(m.depthwise(m.expand(x))))).mean((2, 3))),
        expand=nn.Conv2d(3, 6, 1),
        depthwise=nn.Conv2d(6, 6, 3, padding=1, groups=6),
        bn=nn.BatchNorm2d(6),
        project=nn.Conv2d(6, 5, 1),
        head=nn.Linear(5, 4),
    )


def sequential(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def dense_block() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = torch.cat([x, m.one(F.relu(m.bn(x)))], 1)
        x = torch.cat([x, m.two(x)], 1)
        return m.head(x.mean((2, 3)))

    return Net(
        forward,
        stem=nn.Conv2d(3, 4, 3),
        bn=nn.BatchNorm2d(4),
        one=nn.Conv2d(4, 3, 3, padding=1),
        two=nn.Conv2d(7, 2, 1),
        head=nn.Linear(9, 4),
    )


def squeeze_excite() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.conv(x).relu()
        s = torch.sigmoid(m.up(F.relu(m.down(x.mean((2, 3))))))
        return m.out(x * s[:, :, None, None])

    return Net(forward, conv=nn.Conv2d(3, 6, 3), down=nn.Linear(6, 3), up=nn.Linear(3, 6), out=nn.Conv2d(6, 2, 1))


def flattened(how: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Net(lambda m, x: m.fc(how(m.conv(x).relu())), conv=nn.Conv2d(3, 8, 2), fc=nn.Linear(8 * 49, 4))


def between(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """An operation between two convolutions."""
    return lambda: Net(lambda m, x: m.b(function(m.a(x))), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 3))


def between_linear(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """An operation between two linear layers on a sequence, so that no input is gated finer."""
    return lambda: Net(lambda m, x: m.b(function(m.a(x))), a=nn.Linear(6, 8), b=nn.Linear(8, 4))


def tied() -> nn.Module:
    net = Net(
        lambda m, x: m.out(F.relu(m.b(F.relu(m.a(F.relu(m.first(x))))))),
        first=nn.Linear(6, 8),
        a=nn.Linear(8, 8, bias=False),
        b=nn.Linear(8, 8, bias=False),
        out=nn.Linear(8, 4),
    )
    net.b.weight = net.a.weight  # type: ignore[union-attr,assignment]
    return net


def frozen(*axes: tuple[str, str, str]) -> frozenset[tuple[str, str, str]]:
    return frozenset(axes)


def _shuffle(x: Tensor) -> Tensor:
    return x.view(x.shape[0], 2, 4, *x.shape[2:]).transpose(1, 2).flatten(1, 2)


CASES = [
    Case(
        "mlp",
        mlp,
        images(1, 4),
        {
            "1.inputs": G(16, "input", "1.weight[1]", "", "1.weight[1]"),
            "1": G(12, "neuron", "1.weight[0] 1.bias[0] 3.weight[1]", "1.weight[0]", "3.weight[1]"),
            "3": G(10, "neuron", "3.weight[0] 3.bias[0] 5.weight[1]", "3.weight[0]", "5.weight[1]"),
        },
        frozen(
            ("5.weight[0]", "network output", "5"),
        ),
    ),
    Case(
        "mlp groups",
        mlp,
        images(1, 4),
        {
            "1": G(12, "neuron", "1.weight[0] 1.bias[0] 3.weight[1]", "1.weight[0]", "3.weight[1]"),
            "3": G(10, "neuron", "3.weight[0] 3.bias[0] 5.weight[1]", "3.weight[0]", "5.weight[1]"),
        },
        frozen(
            ("1.weight[1]", "network input", "1"),
            ("5.weight[0]", "network output", "5"),
        ),
        units="groups",
    ),
    Case(
        "mlp weights",
        mlp,
        images(1, 4),
        {
            "1.weight": G(192, "weight", "", "", ""),
            "3.weight": G(120, "weight", "", "", ""),
            "5.weight": G(40, "weight", "", "", ""),
        },
        frozen(),
        units="weights",
    ),
    Case(
        "lenet",
        lenet,
        images(1, 28),
        {
            "conv1": G(6, "map", "conv1.weight[0] conv1.bias[0] conv2.weight[1]", "conv1.weight[0]", "conv2.weight[1]"),
            "conv2": G(7, "map", "conv2.weight[0] conv2.bias[0] fc1.weight[1]", "conv2.weight[0]", "fc1.weight[1]"),
            "fc1.inputs": G(112, "input", "fc1.weight[1]", "", "fc1.weight[1]"),
            "fc1": G(9, "neuron", "fc1.weight[0] fc1.bias[0] fc2.weight[1]", "fc1.weight[0]", "fc2.weight[1]"),
        },
        frozen(
            ("fc2.weight[0]", "network output", "fc2"),
        ),
    ),
    Case(
        "lenet groups",
        lenet,
        images(1, 28),
        {
            "conv1": G(6, "map", "conv1.weight[0] conv1.bias[0] conv2.weight[1]", "conv1.weight[0]", "conv2.weight[1]"),
            "conv2": G(7, "map", "conv2.weight[0] conv2.bias[0] fc1.weight[1]", "conv2.weight[0]", "fc1.weight[1]"),
            "fc1": G(9, "neuron", "fc1.weight[0] fc1.bias[0] fc2.weight[1]", "fc1.weight[0]", "fc2.weight[1]"),
        },
        frozen(
            ("fc2.weight[0]", "network output", "fc2"),
        ),
        units="groups",
    ),
    Case(
        "lenet weights",
        lenet,
        images(1, 28),
        {
            "conv1.weight": G(150, "weight", "", "", ""),
            "conv2.weight": G(1050, "weight", "", "", ""),
            "fc1.weight": G(1008, "weight", "", "", ""),
            "fc2.weight": G(36, "weight", "", "", ""),
        },
        frozen(),
        units="weights",
    ),
    Case(
        "residual",
        residual,
        images(),
        {
            "stem": G(
                6,
                "map",
                f"stem.weight[0] conv1.weight[1] conv2.weight[0] head.weight[1] {norm('bn0')} {norm('bn2')}",
                "stem.weight[0] conv2.weight[0]",
                "conv1.weight[1] head.weight[1]",
            ),
            "conv1": G(
                5,
                "map",
                f"conv1.weight[0] conv2.weight[1] {norm('bn1')}",
                "conv1.weight[0]",
                "conv2.weight[1]",
            ),
        },
        frozen(
            ("stem.weight[1]", "network input", "stem"),
            ("head.weight[0]", "network output", "head"),
        ),
    ),
    Case(
        "mobile",
        mobile,
        images(),
        {
            "expand": G(
                6,
                "map",
                f"expand.weight[0] expand.bias[0] depthwise.weight[0] depthwise.bias[0] project.weight[1] {norm('bn')}",
                "expand.weight[0] depthwise.weight[0]",
                "project.weight[1]",
            ),
            "project": G(
                5, "map", "project.weight[0] project.bias[0] head.weight[1]", "project.weight[0]", "head.weight[1]"
            ),
        },
        frozen(
            ("expand.weight[1]", "network input", "expand"),
            ("head.weight[0]", "network output", "head"),
        ),
    ),
    Case(
        "depthwise multiplier",
        lambda: sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 2, 1)),
        images(),
        {
            "0": G(
                4,
                "map",
                "0.weight[0] 0.bias[0] 1.weight[0] 1.bias[0] 2.weight[1]",
                "0.weight[0] 1.weight[0]",
                "2.weight[1]",
            ),
            "1": G(2, "map", "1.weight[0] 1.bias[0] 2.weight[1]", "1.weight[0]", "2.weight[1]"),
        },
        frozen(
            ("0.weight[1]", "network input", "0"),
            ("2.weight[0]", "network output", "2"),
        ),
    ),
    Case(
        "grouped",
        lambda: sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3, groups=2), nn.Conv2d(4, 2, 1)),
        images(),
        {
            "0": G(
                2,
                "map",
                "0.weight[0] 0.bias[0] 1.weight[0] 1.bias[0] 2.weight[1]",
                "0.weight[0] 1.weight[0]",
                "2.weight[1]",
            ),
            "0#2": G(3, "map", "0.weight[0] 0.bias[0] 1.weight[1]", "0.weight[0]", "1.weight[1]"),
            "1": G(2, "map", "1.weight[0] 1.bias[0] 2.weight[1]", "1.weight[0]", "2.weight[1]"),
        },
        frozen(
            ("0.weight[1]", "network input", "0"),
            ("2.weight[0]", "network output", "2"),
        ),
    ),
    Case(
        "transposed",
        lambda: sequential(
            nn.Conv2d(3, 6, 3), nn.ConvTranspose2d(6, 5, 2, stride=2), nn.BatchNorm2d(5), nn.Conv2d(5, 2, 1)
        ),
        images(),
        {
            "0": G(6, "map", "0.weight[0] 0.bias[0] 1.weight[0]", "0.weight[0]", "1.weight[0]"),
            "1": G(
                5,
                "map",
                f"1.weight[1] 1.bias[0] 3.weight[1] {norm('2')}",
                "1.weight[1]",
                "3.weight[1]",
            ),
        },
        frozen(
            ("0.weight[1]", "network input", "0"),
            ("3.weight[0]", "network output", "3"),
        ),
    ),
    Case(
        "transposed groups",
        lambda: sequential(nn.Conv2d(3, 6, 3), nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2), nn.Conv2d(4, 2, 1)),
        images(),
        {
            "0": G(2, "map", "0.weight[0] 0.bias[0] 1.weight[0] 1.bias[0] 2.weight[1]", "0.weight[0]", "2.weight[1]"),
            "0#2": G(3, "map", "0.weight[0] 0.bias[0] 1.weight[0]", "0.weight[0]", "1.weight[0]"),
            "1": G(2, "map", "1.weight[1] 1.bias[0] 2.weight[1]", "1.weight[1]", "2.weight[1]"),
        },
        frozen(
            ("0.weight[1]", "network input", "0"),
            ("2.weight[0]", "network output", "2"),
        ),
    ),
    Case(
        "transposed depthwise",
        lambda: sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 2, groups=4), nn.Conv2d(4, 2, 1)),
        images(),
        {
            "0": G(4, "map", "0.weight[0] 0.bias[0] 1.weight[0] 1.bias[0] 2.weight[1]", "0.weight[0]", "2.weight[1]"),
        },
        frozen(
            ("0.weight[1]", "network input", "0"),
            ("2.weight[0]", "network output", "2"),
        ),
    ),
    Case(
        "concat",
        dense_block,
        images(),
        {
            "stem": G(
                4,
                "map",
                f"stem.weight[0] stem.bias[0] one.weight[1] two.weight[1] head.weight[1] {norm('bn')}",
                "stem.weight[0]",
                "one.weight[1] two.weight[1] head.weight[1]",
            ),
            "one": G(
                3,
                "map",
                "one.weight[0] one.bias[0] two.weight[1] head.weight[1]",
                "one.weight[0]",
                "two.weight[1] head.weight[1]",
            ),
            "two": G(2, "map", "two.weight[0] two.bias[0] head.weight[1]", "two.weight[0]", "head.weight[1]"),
        },
        frozen(
            ("stem.weight[1]", "network input", "stem"),
            ("head.weight[0]", "network output", "head"),
        ),
    ),
    Case(
        "squeeze excite",
        squeeze_excite,
        images(),
        {
            "conv": G(
                6,
                "map",
                "conv.weight[0] conv.bias[0] down.weight[1] up.weight[0] up.bias[0] out.weight[1]",
                "conv.weight[0] up.weight[0]",
                "down.weight[1] out.weight[1]",
            ),
            "down": G(3, "neuron", "down.weight[0] down.bias[0] up.weight[1]", "down.weight[0]", "up.weight[1]"),
        },
        frozen(
            ("conv.weight[1]", "network input", "conv"),
            ("out.weight[0]", "network output", "out"),
        ),
    ),
    Case(
        "flatten",
        flattened(lambda x: x.flatten(1)),
        images(),
        {
            "conv": G(8, "map", "conv.weight[0] conv.bias[0] fc.weight[1]", "conv.weight[0]", "fc.weight[1]"),
            "fc.inputs": G(392, "input", "fc.weight[1]", "", "fc.weight[1]"),
        },
        frozen(
            ("conv.weight[1]", "network input", "conv"),
            ("fc.weight[0]", "network output", "fc"),
        ),
    ),
    Case(
        "view size",
        flattened(lambda x: x.view(x.size(0), -1)),
        images(),
        {
            "conv": G(8, "map", "conv.weight[0] conv.bias[0] fc.weight[1]", "conv.weight[0]", "fc.weight[1]"),
            "fc.inputs": G(392, "input", "fc.weight[1]", "", "fc.weight[1]"),
        },
        frozen(
            ("conv.weight[1]", "network input", "conv"),
            ("fc.weight[0]", "network output", "fc"),
        ),
    ),
    Case(
        "view literal",
        flattened(lambda x: x.view(-1, 8 * 49)),
        images(),
        {
            "conv": G(8, "map", "conv.weight[0] conv.bias[0] fc.weight[1]", "conv.weight[0]", "fc.weight[1]"),
            "fc.inputs": G(392, "input", "fc.weight[1]", "", "fc.weight[1]"),
        },
        frozen(
            ("conv.weight[1]", "network input", "conv"),
            ("fc.weight[0]", "network output", "fc"),
        ),
    ),
    Case(
        "channel shuffle",
        between(_shuffle),
        images(),
        {
            "a": G(2, "map", "a.weight[0] a.bias[0] b.weight[1]", "a.weight[0]", "b.weight[1]"),
            "a#2": G(4, "map", "a.weight[0] a.bias[0] b.weight[1]", "a.weight[0]", "b.weight[1]"),
        },
        frozen(
            ("a.weight[1]", "network input", "a"),
            ("b.weight[0]", "network output", "b"),
        ),
    ),
    Case(
        "softmax over channels",
        between(lambda x: x.softmax(1)),
        images(),
        {},
        frozen(
            ("a.weight[0]", "aten.softmax.int", "a"),
            ("a.weight[1]", "network input", "a"),
            ("b.weight[0]", "network output", "b"),
        ),
    ),
    Case(
        "softmax over pixels",
        between(lambda x: x.flatten(2).softmax(-1).view(x.shape)),
        images(),
        {
            "a": G(8, "map", "a.weight[0] a.bias[0] b.weight[1]", "a.weight[0]", "b.weight[1]"),
        },
        frozen(
            ("a.weight[1]", "network input", "a"),
            ("b.weight[0]", "network output", "b"),
        ),
    ),
    Case(
        "mean over channels",
        between(lambda x: x * x.mean(1, keepdim=True)),
        images(),
        {},
        frozen(
            ("a.weight[0]", "aten.mean.dim", "a"),
            ("a.weight[1]", "network input", "a"),
            ("b.weight[0]", "network output", "b"),
        ),
    ),
    Case(
        "mean over pixels",
        between(lambda x: x * x.mean((2, 3), keepdim=True)),
        images(),
        {
            "a": G(8, "map", "a.weight[0] a.bias[0] b.weight[1]", "a.weight[0]", "b.weight[1]"),
        },
        frozen(
            ("a.weight[1]", "network input", "a"),
            ("b.weight[0]", "network output", "b"),
        ),
    ),
    Case(
        "layer norm",
        lambda: sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 4)),
        vectors(),
        {
            "0.inputs": G(6, "input", "0.weight[1]", "", "0.weight[1]"),
            "2": G(5, "neuron", "2.weight[0] 2.bias[0] 4.weight[1]", "2.weight[0]", "4.weight[1]"),
        },
        frozen(
            ("0.weight[0]", "aten.layer_norm.default", "1"),  # the norm's own and the next layer's are the same axis
            ("4.weight[0]", "network output", "4"),
        ),
    ),
    Case(
        "custom op",
        lambda: sequential(
            nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), Swirl()), nn.Conv2d(4, 5, 3), nn.Conv2d(5, 2, 1)
        ),
        images(),
        {
            "2": G(5, "map", "2.weight[0] 2.bias[0] 3.weight[1]", "2.weight[0]", "3.weight[1]"),
        },
        frozen(
            ("0.weight[0]", "prunus_tests.swirl.default", "1.1"),
            ("0.weight[1]", "network input", "0"),
            ("2.weight[1]", "prunus_tests.swirl.default", "1.1"),
            ("3.weight[0]", "network output", "3"),
        ),
    ),
    Case(
        "shared module",
        lambda: Net(
            lambda m, x: m.out(F.relu(m.h(F.relu(m.h(F.relu(m.first(x))))))),
            first=nn.Linear(6, 8),
            h=nn.Linear(8, 8),
            out=nn.Linear(8, 4),
        ),
        vectors(),
        {
            "first.inputs": G(6, "input", "first.weight[1]", "", "first.weight[1]"),
            "first": G(
                8,
                "neuron",
                "first.weight[0] first.bias[0] h.weight[0] h.weight[1] h.bias[0] out.weight[1]",
                "first.weight[0] h.weight[0]",
                "h.weight[1] out.weight[1]",
            ),
        },
        frozen(
            ("out.weight[0]", "network output", "out"),
        ),
    ),
    Case(
        "tied",
        tied,
        vectors(),
        {
            "first.inputs": G(6, "input", "first.weight[1]", "", "first.weight[1]"),
            "first": G(
                8,
                "neuron",
                "first.weight[0] first.bias[0] a.weight[0] a.weight[1] out.weight[1]",
                "first.weight[0] a.weight[0]",
                "a.weight[1] out.weight[1]",
            ),
        },
        frozen(
            ("out.weight[0]", "network output", "out"),
        ),
    ),
    Case(
        "computed weight",
        lambda: sequential(
            nn.Conv2d(3, 4, 3), Standardised(4, 5, 3), nn.Conv2d(5, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 1)
        ),
        images(),
        {
            "2": G(6, "map", "2.weight[0] 2.bias[0] 4.weight[1]", "2.weight[0]", "4.weight[1]"),
        },
        frozen(
            ("0.weight[0]", "aten.mean.dim", "1"),
            ("0.weight[1]", "network input", "0"),
            ("1.weight[0]", "no layer's own weight makes it", "1"),
            ("4.weight[0]", "network output", "4"),
        ),
    ),
    Case(
        "weight used elsewhere",
        lambda: Net(lambda m, x: (m.b(F.relu(m.a(x))), m.b.weight.abs().mean(0)), a=nn.Linear(6, 8), b=nn.Linear(8, 4)),
        vectors(),
        {
            "a.inputs": G(6, "input", "a.weight[1]", "", "a.weight[1]"),
        },
        frozen(
            ("a.weight[0]", "network output", "a"),
            ("b.weight[0]", "network output", "b"),  # the mean over it is no obstacle
        ),
    ),
    Case(
        "weight only scaled elsewhere",
        lambda: Net(
            lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))) * m.b.weight.abs().mean(),
            a=nn.Linear(6, 8),
            b=nn.Linear(8, 7),
            c=nn.Linear(7, 4),
        ),
        vectors(),
        {
            "a.inputs": G(6, "input", "a.weight[1]", "", "a.weight[1]"),
        },
        frozen(
            ("a.weight[0]", "b.weight also used by aten.abs.default", "b"),
            ("b.weight[0]", "aten.mean.default", "b"),
            ("c.weight[0]", "network output", "c"),
        ),
    ),
    Case(
        "weight reused",
        lambda: Net(
            lambda m, x: m.c(torch.tanh(m.b(F.relu(m.a(x))) + F.linear(m.a(x), m.b.weight.exp()))),
            a=nn.Linear(6, 8),
            b=nn.Linear(8, 7),
            c=nn.Linear(7, 4),
        ),
        vectors(),
        {
            "b": G(7, "neuron", "b.weight[0] b.bias[0] c.weight[1]", "b.weight[0]", "c.weight[1]"),
        },
        frozen(
            ("a.weight[0]", "b.weight also used by aten.exp.default", "b"),
            ("a.weight[1]", "network input", "a"),
            ("c.weight[0]", "network output", "c"),
        ),
    ),
    Case(
        "unused layer",
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(6, 8), b=nn.Linear(8, 4), spare=nn.Linear(5, 3)),
        vectors(),
        {
            "a.inputs": G(6, "input", "a.weight[1]", "", "a.weight[1]"),
            "a": G(8, "neuron", "a.weight[0] a.bias[0] b.weight[1]", "a.weight[0]", "b.weight[1]"),
        },
        frozen(
            ("b.weight[0]", "network output", "b"),
            ("spare.weight[0]", "no layer reads it", "spare"),
            ("spare.weight[1]", "no layer reads it", "spare"),
            ("spare.bias[0]", "no layer reads it", "spare"),
        ),
    ),
    Case(
        "weight multiplied elsewhere",
        lambda: Net(
            lambda m, x: m.c(F.relu(m.a(x)).unsqueeze(1) * m.b.weight).flatten(1) + m.b(m.a(x)).repeat(1, 4),
            a=nn.Linear(6, 8),
            b=nn.Linear(8, 7),
            c=nn.Linear(8, 4),
        ),
        vectors(),
        {},
        frozen(
            ("a.weight[0]", "b.weight also used by aten.mul.Tensor", "b"),
            ("a.weight[1]", "network input", "a"),
            ("b.weight[0]", "aten.add.Tensor", "b"),  # (7 x 4) and (4 x 7) are the same 28 in no way
            ("c.weight[0]", "aten.add.Tensor", "c"),
        ),
    ),
    Case(
        "conv1d",
        lambda: sequential(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(6, 2, 2)),
        lambda: (torch.randn(2, 3, 9),),
        {
            "0": G(
                6,
                "map",
                f"0.weight[0] 0.bias[0] 4.weight[1] {norm('1')}",
                "0.weight[0]",
                "4.weight[1]",
            ),
        },
        frozen(
            ("0.weight[1]", "network input", "0"),
            ("4.weight[0]", "network output", "4"),
        ),
    ),
    Case(
        "conv3d",
        lambda: sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.AvgPool3d(2), nn.Conv3d(4, 2, 1)),
        lambda: (torch.randn(2, 2, 6, 6, 6),),
        {
            "0": G(
                4,
                "map",
                f"0.weight[0] 0.bias[0] 4.weight[1] {norm('1')}",
                "0.weight[0]",
                "4.weight[1]",
            ),
        },
        frozen(
            ("0.weight[1]", "network input", "0"),
            ("4.weight[0]", "network output", "4"),
        ),
    ),
    Case(
        "prelu",
        lambda: sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Conv2d(4, 5, 3), nn.PReLU(), nn.Conv2d(5, 2, 1)),
        images(),
        {
            "0": G(4, "map", "0.weight[0] 0.bias[0] 1.weight[0] 2.weight[1]", "0.weight[0]", "2.weight[1]"),
            "2": G(5, "map", "2.weight[0] 2.bias[0] 4.weight[1]", "2.weight[0]", "4.weight[1]"),
        },
        frozen(
            ("0.weight[1]", "network input", "0"),
            ("4.weight[0]", "network output", "4"),
        ),
    ),
    Case(
        "kwargs",
        lambda: Net(
            lambda m, *, b, a: m.out(F.relu(m.left(a) + m.right(b))),
            left=nn.Linear(6, 8),
            right=nn.Linear(5, 8),
            out=nn.Linear(8, 4),
        ),
        lambda: (),
        {
            "left.inputs": G(6, "input", "left.weight[1]", "", "left.weight[1]"),
            "left": G(
                8,
                "neuron",
                "left.weight[0] left.bias[0] right.weight[0] right.bias[0] out.weight[1]",
                "left.weight[0] right.weight[0]",
                "out.weight[1]",
            ),
            "right.inputs": G(5, "input", "right.weight[1]", "", "right.weight[1]"),
        },
        frozen(
            ("out.weight[0]", "network output", "out"),
        ),
        kwargs=lambda: {"a": torch.randn(3, 6), "b": torch.randn(3, 5)},
    ),
    Case(
        "dict input, several outputs",
        lambda: Net(
            lambda m, d: {"y": m.one(F.relu(m.h(d["x"]))), "pair": (m.two(F.relu(m.h(d["x"]))), d["x"] > 0)},
            h=nn.Linear(6, 8),
            one=nn.Linear(8, 4),
            two=nn.Linear(8, 3),
        ),
        lambda: ({"x": torch.randn(3, 6)},),
        {
            "h": G(
                8,
                "neuron",
                "h.weight[0] h.bias[0] one.weight[1] two.weight[1]",
                "h.weight[0]",
                "one.weight[1] two.weight[1]",
            ),
        },
        frozen(
            ("h.weight[1]", "network input", "h"),
            ("one.weight[0]", "network output", "one"),
            ("two.weight[0]", "network output", "two"),
        ),
    ),
    Case(
        "dtype conversion",
        lambda: Net(lambda m, x: m.b(m.a(x).double().float()), a=nn.Linear(6, 8), b=nn.Linear(8, 4)),
        vectors(),
        {
            "a.inputs": G(6, "input", "a.weight[1]", "", "a.weight[1]"),
            "a": G(8, "neuron", "a.weight[0] a.bias[0] b.weight[1]", "a.weight[0]", "b.weight[1]"),
        },
        frozen(
            ("b.weight[0]", "network output", "b"),
        ),
    ),
    Case(
        "variance of everything",
        lambda: Net(lambda m, x: m.b(m.a(x)) / torch.var(m.a(x), unbiased=False), a=nn.Linear(6, 8), b=nn.Linear(8, 4)),
        vectors(),
        {},
        frozen(
            ("a.weight[0]", "aten.var.default", "a"),
            ("a.weight[1]", "network input", "a"),
            ("b.weight[0]", "network output", "b"),
        ),
    ),
    Case(
        "pool over neurons",
        lambda: Net(
            lambda m, x: m.b(F.max_pool1d(F.relu(m.a(x)).unsqueeze(1), 2).squeeze(1)),
            a=nn.Linear(6, 8),
            b=nn.Linear(4, 4),
        ),
        vectors(),
        {
            "a.inputs": G(6, "input", "a.weight[1]", "", "a.weight[1]"),
            "b.inputs": G(4, "input", "b.weight[1]", "", "b.weight[1]"),
        },
        frozen(
            ("a.weight[0]", "aten.max_pool1d.default", "a"),
            ("b.weight[0]", "network output", "b"),
        ),
    ),
    Case(
        "attention product",
        lambda: Net(
            lambda m, x: m.c(m.b(F.relu(m.a(x))) @ x.transpose(1, 2)),
            a=nn.Linear(6, 8),
            b=nn.Linear(8, 6),
            c=nn.Linear(5, 4),
        ),
        lambda: (torch.randn(2, 5, 6),),
        {
            "a.inputs": G(6, "input", "a.weight[1]", "", "a.weight[1]"),
            "a": G(8, "neuron", "a.weight[0] a.bias[0] b.weight[1]", "a.weight[0]", "b.weight[1]"),
        },
        frozen(
            ("b.weight[0]", "network input", "b"),  # what b makes meets the input's features, c reads the input's rows
            ("c.weight[0]", "network output", "c"),
            ("c.weight[1]", "network input", "c"),
        ),
    ),
    Case(
        "two flattened branches",
        lambda: Net(
            lambda m, x: m.fc(torch.cat([m.a(x).flatten(1), m.b(x).flatten(1)], 1)),
            a=nn.Conv2d(3, 4, 7),
            b=nn.Conv2d(3, 5, 7),
            fc=nn.Linear(36, 4),
        ),
        images(),
        {
            "a": G(4, "map", "a.weight[0] a.bias[0] fc.weight[1]", "a.weight[0]", "fc.weight[1]"),
            "b": G(5, "map", "b.weight[0] b.bias[0] fc.weight[1]", "b.weight[0]", "fc.weight[1]"),
            "fc.inputs": G(36, "input", "fc.weight[1]", "", "fc.weight[1]"),
        },
        frozen(
            ("a.weight[1]", "network input", "a"),
            ("fc.weight[0]", "network output", "fc"),
        ),
    ),
    Case(
        "mixer",
        lambda: Net(
            lambda m, x: m.out(m.tokens(F.relu(m.channels(x)).transpose(1, 2)).mean(2)),
            channels=nn.Linear(6, 8),
            tokens=nn.Linear(5, 7),
            out=nn.Linear(8, 4),
        ),
        lambda: (torch.randn(2, 5, 6),),
        {
            "channels.inputs": G(6, "input", "channels.weight[1]", "", "channels.weight[1]"),
            "channels": G(
                8, "neuron", "channels.weight[0] channels.bias[0] out.weight[1]", "channels.weight[0]", "out.weight[1]"
            ),
            "tokens.inputs": G(5, "input", "tokens.weight[1]", "", "tokens.weight[1]"),
        },
        frozen(
            ("tokens.weight[0]", "aten.mean.dim", "tokens"),
            ("out.weight[0]", "network output", "out"),
        ),
    ),
    Case(
        "slice idiom",
        lambda: Net(
            lambda m, x: m.b(m.a(x) * torch.sigmoid(m.a(x).mean((2, 3)))[:, :, None, None]),
            a=nn.Conv2d(3, 4, 3),
            b=nn.Conv2d(4, 2, 1),
        ),
        images(),
        {
            "a": G(4, "map", "a.weight[0] a.bias[0] b.weight[1]", "a.weight[0]", "b.weight[1]"),
        },
        frozen(
            ("a.weight[1]", "network input", "a"),
            ("b.weight[0]", "network output", "b"),
        ),
    ),
    Case(
        "layer scale",
        lambda: Net(
            lambda m, x: m.b(m.a(x) * m.scale + m.place),
            a=nn.Conv2d(3, 4, 3),
            scale=nn.Parameter(torch.rand(4, 1, 1)),
            place=nn.Parameter(torch.randn(1, 4, 6, 6)),
            b=nn.Conv2d(4, 2, 1),
        ),
        images(),
        {
            "a": G(4, "map", "scale[0] place[1] a.weight[0] a.bias[0] b.weight[1]", "a.weight[0]", "b.weight[1]"),
        },
        frozen(
            ("a.weight[1]", "network input", "a"),
            ("b.weight[0]", "network output", "b"),
        ),
    ),
]
