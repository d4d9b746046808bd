"""Weights that are removed where they stand, as exact zeros: one by one, in blocks, or all but n of every m.

A weight is seen as a matrix, its first dimension by the product of all others: outputs x (inputs x kernel). It is laid
out with blocks of r rows and c columns; where r and c do not divide it, what is left at the right, at the bottom and in
the corner is blocks of other sizes. Every size is a group of its own, so that a unit always stands for the same number
of weights and costs stay polynomials in the groups' counts. A block of one weight is a weight by itself.

Of every m weights that follow each other in a row at most n stay ("2:4"): hardware multiplies with such rows faster.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from prunus.errors import ArtefactError, ModelError

PARTS = ("", "#right", "#bottom", "#corner")  # what a part adds to its tensor's name, to name its group
FEW = 16
Tile = tuple[int, int, int, int]  # blocks down and across, rows and columns of one


@dataclass(frozen=True, slots=True)
class Scattered:
    """How the weights of one tensor are grouped into units.

    `groups` names the group of every part (the whole blocks, right, bottom, corner); None where there is none, or where
    its weights carry no gates and always stay. `block` are the rows and columns of one unit. `most` is (n, m) where at
    most n of every m weights stay.
    """

    groups: tuple[str | None, ...]
    block: tuple[int, int] = (1, 1)
    most: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.most is not None:
            return f"{self.most[0]} of every {self.most[1]} of its weights at most"
        return (
            "its weights one by one" if self.block == (1, 1) else f"blocks of {self.block[0]}x{self.block[1]} weights"
        )

    def named(self, shape: tuple[int, ...]) -> dict[str, Tile]:
        """Its groups, with the blocks of each.

        >>> Scattered(("w", "w#right", None, None), (2, 2)).named((4, 5))
        {'w': (2, 2, 2, 2), 'w#right': (2, 1, 2, 1)}
        """
        found = zip(self.groups, tiles(shape, self.block), strict=True)
        return {group: tile for group, tile in found if group is not None}

    def units(self, shape: tuple[int, ...]) -> dict[str, int]:
        """The number of units of its groups."""
        return {group: down * across for group, (down, across, _, _) in self.named(shape).items()}

    def numbers(self, shape: tuple[int, ...]) -> dict[str, int]:
        """How many weights one unit of each group stands for."""
        return {group: rows * columns for group, (_, _, rows, columns) in self.named(shape).items()}

    def rest(self, shape: tuple[int, ...]) -> int:
        """How many weights belong to no group."""
        return prod(shape) - sum(prod(tile) for tile in self.named(shape).values())

    def over(self, values: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """Lay the groups' values out over the weights; one where no group is.

        >>> Scattered(("w", None, None, None), (1, 2)).over({"w": torch.tensor([2, 3])}, (2, 3)).tolist()
        [[2, 2, 1], [3, 3, 1]]
        """
        if self.block == (1, 1) and self.groups[0] is not None:
            return values[self.groups[0]].view(shape)
        like = next(value for group, value in values.items() if group in self.groups)
        parts = []
        for group, (down, across, rows, columns) in zip(self.groups, tiles(shape, self.block), strict=True):
            if group is None:
                parts.append(like.new_ones(1).expand(down * rows, across * columns))
                continue
            blocks = values[group].view(down, 1, across, 1).expand(down, rows, across, columns)
            parts.append(blocks.reshape(down * rows, across * columns))
        halves = [torch.cat(parts[:2], dim=1), torch.cat(parts[2:], dim=1)]
        return torch.cat(halves).view(shape)

    def without(self, gone: Mapping[str, Any]) -> "Scattered":
        """The same, some groups of it frozen."""
        return Scattered(tuple(None if group in gone else group for group in self.groups), self.block, self.most)

    def to_json(self) -> Any:
        """Write it as JSON: one by one as the group's name alone."""
        if self.block == (1, 1) and self.most is None:
            return self.groups[0]
        return {
            "groups": list(self.groups),
            "block": list(self.block),
            "most": None if self.most is None else list(self.most),
        }


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """A weight's rows and columns.

    >>> matrix((50, 20, 5, 5)), matrix((7,))
    ((50, 500), (7, 1))
    """
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def tiles(shape: tuple[int, ...], block: tuple[int, int]) -> list[Tile]:
    """The blocks of a weight, part by part: the whole ones, right, bottom, corner.

    >>> tiles((10, 7), (4, 3))
    [(2, 2, 4, 3), (2, 1, 4, 1), (1, 2, 2, 3), (1, 1, 2, 1)]
    """
    (rows, columns), (r, c) = matrix(shape), block
    down, across, low, right = rows // r, columns // c, rows % r, columns % c
    return [
        (down, across, r, c),
        (down, int(right > 0), r, right),
        (int(low > 0), across, low, c),
        (int(low > 0), int(right > 0), low, right),
    ]


def read(units: Any) -> Scattered | None:
    """Read a kind of unit that is removed where it stands: weights, blocks (16x16) or n of every m (2:4); else None.

    >>> read("16x4").block, read("2:4").most, read("structured")
    ((16, 4), (2, 4), None)
    """
    if isinstance(units, list | tuple) and len(units) == 1:
        (units,) = units
    if units == "weights":
        return Scattered(())
    text = units if isinstance(units, str) else ""
    if found := re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", text):
        block = (int(found[1]), int(found[2]))
        if min(block) < 1:
            raise ModelError(f"units={units!r}: a block has one row and one column at least, such as 16x16.")
        return Scattered((), block)
    if found := re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text):
        n, m = int(found[1]), int(found[2])
        if not 1 <= n < m:
            raise ModelError(f"units={units!r}: of every m weights n stay, at least 1 and fewer than m, such as 2:4.")
        return Scattered((), (1, 1), (n, m))
    return None


def laid_out(kind: Scattered, name: str, shape: tuple[int, ...]) -> Scattered | str:
    """Lay a kind of unit out over one tensor, naming its groups; or say why that cannot be."""
    if kind.most is not None and matrix(shape)[1] % kind.most[1]:
        return f"its {matrix(shape)[1]:,} columns (inputs x kernel) are no multiple of {kind.most[1]}"
    least = 1 if kind.block == (1, 1) else 2  # a part of one block cannot lose it: every group keeps a unit
    groups = tuple(
        f"{name}{part}" if down * across >= least else None
        for part, (down, across, _, _) in zip(PARTS, tiles(shape, kind.block), strict=True)
    )
    if not any(groups):
        return f"it holds no two equal blocks of {kind.block[0]}x{kind.block[1]}"
    return Scattered(groups, kind.block, kind.most)


def from_json(value: Any, shape: tuple[int, ...]) -> Scattered:
    """Read back what `Scattered.to_json` writes of a tensor of this shape; anything else is refused."""
    bad = ArtefactError("The plan holds removed weights that are not written as Prunus writes them.")
    if isinstance(value, str):
        return Scattered((value, None, None, None))
    if not isinstance(value, dict) or set(value) != {"groups", "block", "most"}:
        raise bad
    groups, block, most = value["groups"], value["block"], value["most"]
    pairs = [block] if most is None else [block, most]
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs) or not isinstance(groups, list):
        raise bad
    if any(type(number) is not int or not 0 < number < 2**40 for pair in pairs for number in pair):
        raise bad
    if len(groups) != len(PARTS) or any(not isinstance(group, str | None) for group in groups) or not any(groups):
        raise bad
    result = Scattered(tuple(groups), (block[0], block[1]), None if most is None else (most[0], most[1]))
    named = [group for group in groups if group is not None]
    if len(set(named)) < len(named) or any(not count for count in result.units(shape).values()):
        raise bad
    if most is not None and (not most[0] < most[1] or matrix(shape)[1] % most[1] or block != [1, 1]):
        raise bad
    return result


def within(values: Tensor, n: int, m: int) -> Tensor:
    """One at the n greatest of every m values, zero elsewhere; of equal ones the first.

    >>> within(torch.tensor([0.1, 0.4, 0.3, 0.2, 0.0, 0.0, 0.0, 9.0]), 1, 4).tolist()
    [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    """
    rows = values.detach().reshape(-1, m)
    if m > FEW:
        order = rows.argsort(dim=1, descending=True, stable=True)[:, :n]
        return torch.zeros_like(rows).scatter_(1, order, 1).view(values.shape)
    columns, result = rows.unbind(1), []
    for k, one in enumerate(columns):  # how many come before it: several times as quick as sorting so few
        before = torch.zeros_like(one, dtype=torch.int8)
        for j, other in enumerate(columns):
            if j != k:
                before += other >= one if j < k else other > one
        result.append(before < n)
    return torch.stack(result, dim=1).view(values.shape).to(values.dtype)


def shared(p: Tensor, n: int, m: int) -> Tensor:
    """Probabilities to be non-zero where at most n of every m stay, given those without that limit.

    K, how many of m independent units are open, has the distribution that adding them one by one gives; of them
    min(n, K) stay, and E[min(n, K)] = n - sum_{j<n} (n - j) P(K = j) is exact. It is shared out among the m in
    proportion to their own probabilities: sums over them, which is all that costs count, are exact.

    The gradient takes that proportion as given. The sum's own derivative in p_i is the probability that fewer than n
    others are open: with many open it vanishes, and no pressure would ever close a gate.

    >>> shared(torch.tensor([1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0, 0.0]), 2, 4).tolist()
    [0.5, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0]
    """
    rows = p.detach().reshape(-1, m)
    there = [torch.ones_like(rows[:, 0])] + [torch.zeros_like(rows[:, 0])] * (n - 1)  # P(K = j) for j < n
    for q in rows.unbind(1):
        there = [at * (1 - q) + (there[j - 1] * q if j else 0) for j, at in enumerate(there)]
    stay = n - sum((n - j) * at for j, at in enumerate(there))
    factor = torch.as_tensor(stay) / rows.sum(1).clamp(min=torch.finfo(p.dtype).tiny)
    return (p.reshape(-1, m) * factor[:, None]).reshape(p.shape)
