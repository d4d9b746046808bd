"""Kinds of units: what `units=` may ask for."""

import re
from collections.abc import Iterable

from prunus.errors import ModelError, nearest

STRUCTURED = frozenset({"map", "neuron", "feature", "head", "input"})
UNITS: dict[str, frozenset[str]] = {
    "structured": STRUCTURED,
    "groups": STRUCTURED - {"input"},
    "maps": frozenset({"map"}),
    "neurons": frozenset({"neuron"}),
    "features": frozenset({"feature"}),
    "heads": frozenset({"head"}),
    "head_dims": frozenset({"head dim"}),
    "width": frozenset({"width"}),
    "inputs": frozenset({"input"}),
    "branches": frozenset({"branch"}),
}
EVERY = frozenset().union(*UNITS.values())


def kinds_of(units: str | Iterable[str]) -> frozenset[str]:
    """The kinds of units that are asked for, by one word or several (a list, or one string with commas).

    - "structured" (the default): maps of convolutions, neurons of linear layers, features of embeddings, whole
      attention heads, and the input features of linear layers that can be gated finer than any producer can shrink,
      which is the papers' placement; "groups" is the same without those input features.
    - "maps", "neurons", "features", "heads", "inputs": one of these kinds.
    - "head_dims": dimensions of every head, of queries and keys or of values.
    - "width": a residual stream that root-mean-square norms average over; its gates act at everything that makes it.
    - "branches": whole branches of residual networks.

    >>> sorted(kinds_of(["heads", "neurons"]))
    ['head', 'neuron']
    """
    words = []
    for word in [units] if isinstance(units, str) or not isinstance(units, Iterable) else units:
        words += [part.strip() for part in word.split(",")] if isinstance(word, str) else [word]
    for word in words:
        if not isinstance(word, str) or word not in UNITS:
            if re.fullmatch(r"weights|[0-9]+[x:][0-9]+", str(word)):
                raise ModelError(f"units={word!r} removes weights where they stand, and goes with no other kind.")
            also = "blocks of weights such as 16x16, or n of every m weights such as 2:4"
            known = [*UNITS, "weights"]
            raise ModelError(f"units={word!r} is not a kind of unit; {nearest(str(word), known)}; also {also}.")
    if not words:
        raise ModelError(f"units names no kind of unit; there are {', '.join(UNITS)}.")
    return frozenset().union(*(UNITS[word] for word in words))
