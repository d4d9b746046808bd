"""Moments of a sum of independent 0/1 variables: how many units of a group are open, to a power."""

import torch
from torch import Tensor


def raw_moment(p: Tensor, power: int) -> Tensor:
    """E[n^power] for n a sum of independent 0/1 variables with probabilities p, along the last dimension.

    E[n (n-1) … (n-j+1)] = j! e_j(p), with e_j the elementary symmetric polynomials (Newton's identities give them from
    power sums), and n^k is the sum of Stirling numbers times falling factorials. For k = 2 that is
    (sum p)^2 + sum p (1 - p).

    >>> p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    >>> raw_moment(p, 2).item(), raw_moment(p, 3).item()  # n is 0, 1, 1, 2
    (1.5, 2.5)
    """
    if power == 2:
        s = p.sum(-1, keepdim=True)
        return s * s + (p * (1 - p)).sum(-1, keepdim=True)
    sums = [(p**j).sum(-1, keepdim=True) for j in range(1, power + 1)]
    elementary = [torch.ones_like(sums[0])]
    for j in range(1, power + 1):
        total = sum(((-1) ** (i - 1)) * elementary[j - i] * sums[i - 1] for i in range(1, j + 1))
        elementary.append(torch.as_tensor(total) / j)
    stirling = [[1 if i == j == 0 else 0 for i in range(power + 1)] for j in range(power + 1)]
    for n in range(1, power + 1):
        for k in range(1, n + 1):
            stirling[n][k] = k * stirling[n - 1][k] + stirling[n - 1][k - 1]
    result = torch.zeros_like(sums[0])
    factorial = 1
    for j in range(1, power + 1):
        factorial *= j
        result = result + stirling[power][j] * factorial * elementary[j]
    return result


def moment_slope(p: Tensor, power: int) -> Tensor:
    """The derivative of `raw_moment` in every probability.

    >>> moment_slope(torch.tensor([0.5, 0.5], dtype=torch.float64), 2).tolist()  # E[n^2] = 2 p q + p + q
    [2.0, 2.0]
    """
    if power == 2:
        return 2 * p.sum(-1, keepdim=True) + 1 - 2 * p
    with torch.enable_grad():
        at = p.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(raw_moment(at, power).sum(), at)
    return slope
