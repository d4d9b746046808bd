"""Terms: which units lie where along an axis.

- `Leaf(group, size)`: the units of one group, in order (`group=None`: frozen, nothing can be removed),
- `Prod(factors)`: a row-major product, as flattening makes: 50 maps x 16 pixels, or attention: heads x dimensions,
- `Cat(segments)`: segments one behind the other, as concatenation makes,
- `Both(base, fine)`: a finer group laid over a base of the same length; a position is open where both are, which is how
  800 flattened features nest under 50 maps.

Everything else follows by recursion: which positions stay (`spread`), which gate multiplies which weight (`factors`),
who owns a position (`owners`), how many numbers a tensor holds (`prunus.cost`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prunus.errors import ArtefactError


@dataclass(frozen=True, slots=True)
class Leaf:
    """The units of one group in order; frozen where `group` is None."""

    group: str | None
    size: int


@dataclass(frozen=True, slots=True)
class Prod:
    """A row-major product of factors: the last factor runs fastest."""

    factors: "tuple[Term, ...]"

    @property
    def size(self) -> int:
        """How many positions it has."""
        return _product(factor.size for factor in self.factors)


@dataclass(frozen=True, slots=True)
class Cat:
    """Segments one behind the other."""

    segments: "tuple[Term, ...]"

    @property
    def size(self) -> int:
        """How many positions it has."""
        return sum(segment.size for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Both:
    """A finer group over a base of the same length: open where both are open."""

    base: "Term"
    fine: Leaf

    @property
    def size(self) -> int:
        """How many positions it has."""
        return self.fine.size


Term = Leaf | Prod | Cat | Both


def simplified(term: "Prod | Cat") -> "Term":
    """A term that names no group is one frozen leaf."""
    return term if groups_of(term) else Leaf(None, term.size)


def _product(numbers: Any) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def leaves(term: Term) -> list[Leaf]:
    """List the leaves of a term, left to right.

    >>> [leaf.size for leaf in leaves(Both(Prod((Leaf("conv2", 50), Leaf(None, 16))), Leaf("fc1.inputs", 800)))]
    [50, 16, 800]
    """
    if isinstance(term, Leaf):
        return [term]
    if isinstance(term, Both):
        return [*leaves(term.base), term.fine]
    parts = term.factors if isinstance(term, Prod) else term.segments
    return [leaf for part in parts for leaf in leaves(part)]


def groups_of(term: Term) -> set[str]:
    """Name the groups that a term mentions."""
    return {leaf.group for leaf in leaves(term) if leaf.group is not None}


def factors(term: Term, offsets: Mapping[str, int], one: int) -> Tensor:
    """For every position of a term, the flat numbers of the gates whose product acts there.

    Returns a tensor of shape (k, size): row by row one factor; positions with fewer factors are filled with `one`, the
    number of an entry that is always 1.

    >>> term = Prod((Leaf("maps", 2), Leaf(None, 3)))
    >>> factors(term, {"maps": 5}, one=99).tolist()
    [[5, 5, 5, 6, 6, 6]]
    """
    if isinstance(term, Leaf):
        if term.group is None:
            return torch.empty(0, term.size, dtype=torch.long)
        start = offsets[term.group]
        return torch.arange(start, start + term.size).unsqueeze(0)
    if isinstance(term, Both):
        return torch.cat([factors(term.base, offsets, one), factors(term.fine, offsets, one)])
    if isinstance(term, Cat):
        parts = [factors(segment, offsets, one) for segment in term.segments]
        depth = max(part.shape[0] for part in parts)
        padded = [torch.cat([p, torch.full((depth - p.shape[0], p.shape[1]), one, dtype=torch.long)]) for p in parts]
        return torch.cat(padded, dim=1)
    rows, size = [], term.size
    before = 1
    for factor in term.factors:
        inner = factors(factor, offsets, one)
        after = size // (before * factor.size)
        for row in inner:
            rows.append(row.view(1, -1, 1).expand(before, -1, after).reshape(-1))
        before *= factor.size
    return torch.stack(rows) if rows else torch.empty(0, size, dtype=torch.long)


def spread(term: Term, values: Mapping[str, Tensor]) -> Tensor:
    """Lay the groups' values out along a term and multiply where several act: the slow, plain reading of a term.

    >>> spread(Prod((Leaf("maps", 2), Leaf(None, 3))), {"maps": torch.tensor([1.0, 0.5])}).tolist()
    [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    """
    names = sorted(groups_of(term))
    if not names:
        return torch.ones(term.size)
    offsets, start = {}, 0
    for name in names:
        offsets[name] = start
        start += values[name].numel()
    flat = torch.cat([values[name] for name in names] + [torch.ones_like(values[names[0]][:1])])
    return flat[factors(term, offsets, start)].prod(0).to(flat.dtype)


def owners(term: Term, group: str) -> Tensor:
    """Say for every position of a term which unit of `group` it belongs to; -1 where to none.

    >>> owners(Prod((Leaf("maps", 2), Leaf(None, 2))), "maps").tolist()
    [0, 0, 1, 1]
    """
    offsets = dict.fromkeys(groups_of(term), -1000000000)
    if group not in offsets:
        return torch.full((term.size,), -1)
    offsets[group] = 0
    rows = factors(term, offsets, one=-1)
    return rows.clamp(min=-1).amax(0) if rows.numel() else torch.full((term.size,), -1)


def to_json(term: Term) -> list[Any]:
    """Write a term as JSON.

    >>> to_json(Prod((Leaf("conv2", 50), Leaf(None, 16))))
    ['prod', ['leaf', 'conv2', 50], ['leaf', None, 16]]
    """
    if isinstance(term, Leaf):
        return ["leaf", term.group, term.size]
    if isinstance(term, Both):
        return ["both", to_json(term.base), to_json(term.fine)]
    if isinstance(term, Prod):
        return ["prod", *map(to_json, term.factors)]
    return ["cat", *map(to_json, term.segments)]


def from_json(value: Any, depth: int = 0) -> Term:
    """Read a term back; anything else than what `to_json` writes is refused."""
    bad = ArtefactError("The plan holds an axis that is not written as Prunus writes axes.")
    if not isinstance(value, list) or not value or depth > 32:
        raise bad
    kind, parts = value[0], value[1:]
    if kind == "leaf" and len(parts) == 2:
        group, size = parts
        whole = isinstance(size, int) and not isinstance(size, bool)
        if whole and 0 < size < 2**40 and (group is None or isinstance(group, str)):
            return Leaf(group, size)
    elif kind == "both" and len(parts) == 2:
        base, fine = from_json(parts[0], depth + 1), from_json(parts[1], depth + 1)
        if isinstance(fine, Leaf) and fine.group is not None and base.size == fine.size:
            return Both(base, fine)
    elif kind == "prod" and parts:
        return Prod(tuple(from_json(part, depth + 1) for part in parts))
    elif kind == "cat" and parts:
        return Cat(tuple(from_json(part, depth + 1) for part in parts))
    raise bad
