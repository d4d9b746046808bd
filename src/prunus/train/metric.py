"""The metric of the reference loop."""

import torch
from torch import Tensor, nn

from prunus.measure import evaluating

EVALUATION_BATCH = 1024


def accuracy(network: nn.Module, x: Tensor, y: Tensor, batch: int = EVALUATION_BATCH) -> float:
    """The fraction of examples classified right, in evaluation mode."""
    right = torch.zeros((), dtype=torch.long, device=x.device)
    with evaluating(network):
        for start in range(0, len(x), batch):
            right += (network(x[start : start + batch]).argmax(-1) == y[start : start + batch]).sum()
    return right.item() / len(x)
