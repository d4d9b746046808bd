"""Kinds of units: what `units=` may ask for."""

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
    "blocks": frozenset({"block"}),
    "weights": frozenset({"weight"}),
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
    - "blocks": whole branches of residual networks.
    - "weights": one gate a weight; not together with others.

    >>> sorted(kinds_of(["heads", "neurons"]))
    ['head', 'neuron']
    """
    words = []
    for word in [units] if isinstance(units, str) or not isinstance(units, Iterable) else units:
        words += word.replace(" ", "").split(",") if isinstance(word, str) else [word]
    for word in words:
        if not isinstance(word, str) or word not in UNITS:
            raise ModelError(f"units={word!r} is not a kind of unit; {nearest(str(word), UNITS)}.")
    if not words:
        raise ModelError(f"units names no kind of unit; there are {', '.join(UNITS)}.")
    if "weights" in words and len(words) > 1:
        raise ModelError("units='weights' gates every weight by itself: it cannot be combined with other kinds.")
    return frozenset().union(*(UNITS[word] for word in words))
