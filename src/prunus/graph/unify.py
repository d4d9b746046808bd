"""Union-find over axes whose classes have structure: a variable is an atom, a row-major product, or a concatenation.

Plain union-find cannot say that 800 features are 50 maps x 16 pixels. Here unifying two axes refines them in place
until they agree: sizes only ever get smaller, so it ends. Where two structures cannot be brought together exactly, both
are frozen; nothing is guessed.
"""

from dataclasses import dataclass, field
from math import prod


@dataclass(frozen=True)
class Reason:
    """Why an axis is frozen: the operation, and the module where it stands. Silent reasons need no report."""

    operation: str
    module: str
    silent: bool = False


@dataclass(eq=False)
class Var:
    """An axis during the analysis."""

    size: int
    ref: "Var | None" = None
    factors: "list[Var] | None" = None
    segments: "list[Var] | None" = None
    reasons: list[Reason] = field(default_factory=list)
    sums: list[Reason] = field(default_factory=list)  # operations that add up over it without a weight
    kind: str | None = None  # what its units are, where an operation says so: heads, head dims


def find(var: Var) -> Var:
    """Follow references to the variable that stands for `var`."""
    root = var
    while root.ref is not None:
        root = root.ref
    while var.ref is not None:
        var.ref, var = root, var.ref
    return root


def atoms(var: Var) -> list[Var]:
    """The atoms a variable is made of, left to right, each as often as it occurs."""
    root = find(var)
    parts = root.factors if root.factors is not None else root.segments
    if parts is None:
        return [root]
    return [atom for part in parts for atom in atoms(part)]


def freeze(var: Var, reason: Reason) -> None:
    """Freeze every atom of a variable."""
    for atom in atoms(var):
        if reason not in atom.reasons:
            atom.reasons.append(reason)


def add_up(var: Var, reason: Reason) -> None:
    """Note that an operation adds up over a variable without a weight: it is exact only where dead units are zero."""
    for atom in atoms(var):
        if reason not in atom.sums:
            atom.sums.append(reason)


def call(var: Var, kind: str) -> None:
    """Say what the units of a variable are; the first word stays."""
    for atom in atoms(var):
        atom.kind = atom.kind or kind


def known(var: Var) -> bool:
    """Is it frozen already, wherever it has more than one position?"""
    return all(atom.reasons or atom.size == 1 for atom in atoms(var))


def product(parts: list[Var]) -> Var:
    """The row-major product of variables; factors of one position say nothing and are left out."""
    flat: list[Var] = []
    for part in map(find, parts):
        if part.factors is not None:
            flat.extend(find(factor) for factor in part.factors)
        elif part.size != 1:
            flat.append(part)
    if not flat:
        return Var(1)
    if len(flat) == 1:
        return flat[0]
    return Var(prod(part.size for part in flat), factors=list(flat))


def concatenation(parts: list[Var]) -> Var:
    """Variables one behind the other."""
    flat: list[Var] = []
    for part in map(find, parts):
        flat.extend([find(s) for s in part.segments] if part.segments is not None else [part])
    if len(flat) == 1:
        return flat[0]
    return Var(sum(part.size for part in flat), segments=list(flat))


def _become(atom: Var, other: Var) -> None:
    """Let an atom stand for `other`, handing on what is known of it."""
    atom.ref = other
    for reason in atom.reasons:
        freeze(other, reason)
    for reason in atom.sums:
        add_up(other, reason)
    if atom.kind is not None:
        call(other, atom.kind)


def split_product(var: Var, first: int) -> tuple[Var, Var] | None:
    """Split a variable into a product whose first factor has `first` positions; None where that is impossible."""
    var = find(var)
    if first == 1:
        return Var(1), var
    if first == var.size:
        return var, Var(1)
    if var.size % first:
        return None
    if var.factors is not None:
        head: list[Var] = []
        rest = [find(factor) for factor in var.factors]
        need = first
        while need > 1:
            factor = find(rest.pop(0))
            if need % factor.size == 0:
                head.append(factor)
                need //= factor.size
                continue
            parts = split_product(factor, need)
            if parts is None:
                return None
            head.append(parts[0])
            rest.insert(0, parts[1])
            need = 1
        return product(head), product(rest)
    if var.segments is not None:
        return _split_segments(var, var.size // first)
    outer, inner = Var(first), Var(var.size // first)
    _become(var, Var(var.size, factors=[outer, inner]))
    return outer, inner


def _split_segments(var: Var, inner_size: int) -> tuple[Var, Var] | None:
    """A concatenation is a product with inner size s if every segment is one, and the inner parts agree."""
    segments = [find(segment) for segment in var.segments or []]
    if any(segment.size % inner_size for segment in segments):
        return None
    outers, inners = [], []
    for segment in segments:
        parts = split_product(segment, segment.size // inner_size)
        if parts is None:
            return None
        outers.append(parts[0])
        inners.append(parts[1])
    outer, inner = concatenation(outers), inners[0]
    for other in inners[1:]:
        if not unify(inner, other):
            return None
    return outer, find(inner)


def split_cat(var: Var, first: int) -> tuple[Var, Var] | None:
    """Split a variable into a concatenation whose first segment has `first` positions; None where impossible."""
    var = find(var)
    if var.segments is not None:
        head: list[Var] = []
        rest = [find(segment) for segment in var.segments]
        need = first
        while need > 0:
            segment = rest.pop(0)
            if segment.size <= need:
                head.append(segment)
                need -= segment.size
                continue
            parts = split_cat(segment, need)
            if parts is None:
                return None
            head.append(parts[0])
            rest.insert(0, parts[1])
            need = 0
        return concatenation(head), concatenation(rest)
    if var.factors is not None:
        outer, inner = find(var.factors[0]), product(var.factors[1:])
        if first % inner.size:
            return None
        parts = split_cat(outer, first // inner.size)
        if parts is None:
            return None
        return product([parts[0], inner]), product([parts[1], inner])
    left, right = Var(first), Var(var.size - first)
    _become(var, Var(var.size, segments=[left, right]))
    return left, right


CLASH = Reason("axes that cannot be brought together", "")


def unify(a: Var, b: Var, reason: Reason = CLASH) -> bool:
    """Make two axes one. Where their structures clash, both are frozen and the answer is False.

    >>> maps, flat = Var(50), Var(800)
    >>> unify(flat, product([maps, Var(16)]))
    True
    >>> [atom.size for atom in atoms(flat)]
    [50, 16]
    """
    a, b = find(a), find(b)
    if a is b or (a.size == 1 and b.size == 1):
        return True
    if a.size != b.size:
        raise AssertionError(f"axes of {a.size} and {b.size} positions were to be made one")
    if a.factors is None and a.segments is None:
        _become(a, b)
        return True
    if b.factors is None and b.segments is None:
        _become(b, a)
        return True
    if _match(a, b, reason):
        return True
    freeze(a, reason)
    freeze(b, reason)
    return False


def _match(a: Var, b: Var, reason: Reason) -> bool:
    if a.segments is not None or b.segments is not None:
        if a.segments is None:
            a, b = b, a
        first = find((a.segments or [])[0])
        parts = split_cat(b, first.size)
        rest = concatenation((a.segments or [])[1:])
        return parts is not None and unify(first, parts[0], reason) and unify(rest, parts[1], reason)
    left, right = find((a.factors or [])[0]), find((b.factors or [])[0])
    if left.size < right.size:
        a, b, left, right = b, a, right, left
    parts = split_product(left, right.size)
    if parts is None:
        return False
    ok = unify(parts[0], right, reason)
    rest_a = product([parts[1], *(a.factors or [])[1:]])
    rest_b = product((b.factors or [])[1:])
    return ok and unify(rest_a, rest_b, reason)
