"""Networks of the zoo on scikit-learn's digits: 8 x 8 pixels enlarged, for sweeps that train.

PYTHONPATH=tools prunus train --model digits_models:vit --data digits --budget params=50% --out runs/vit
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "zoo"))
from zoo_models import ZOO


class OnDigits(nn.Module):
    """Enlarge and colour an image, classify it."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.size = size
        self.net = ZOO[name].make()
        for module in self.net.modules():  # the zoo's own numbers are for tests of equality
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        classes = self.net.eval()(torch.zeros(2, 3, size, size)).shape[1]
        self.head = nn.Linear(classes, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = x.view(x.shape[0], 1, 8, 8)
        x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", align_corners=False)
        return self.head(self.net(x.expand(-1, 3, -1, -1)))


def resnet18() -> tuple[nn.Module, Tensor]:
    """A ResNet-18 of few maps."""
    return OnDigits("resnet18", 32), torch.randn(2, 1, 8, 8)


def vit() -> tuple[nn.Module, Tensor]:
    """A vision transformer of two blocks."""
    return OnDigits("vit", 16), torch.randn(2, 1, 8, 8)
