"""Sizes that well-known layers remember: set from what stays, so that the user's own classes run smaller.

A layer of PyTorch or transformers holds numbers beside its tensors: `in_features`, `num_groups`, `num_heads`. For the
classes listed here it is known what each number counts, and so what it becomes. A number is set by its meaning, never
because its value happens to equal a size. What is not known keeps its numbers; the proof then says whether it runs.
"""

from torch import nn

from prunus.axes import Graph, Keep
from prunus.surgery.known import attention, layers, libraries
from prunus.surgery.known.attention import SlicedAttention
from prunus.surgery.known.kept import HANDLERS, Kept, count_of_groups

__all__ = ["SlicedAttention", "attention", "count_of_groups", "layers", "libraries", "resize"]


def resize(small: nn.Module, graph: Graph, keep: Keep) -> None:
    """Let every known layer of a model remember the sizes of the tensors that it now holds."""
    paths: dict[int, list[str]] = {}
    for path, module in small.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    rescaled: set[int] = set()
    for module in small.modules():
        kept = Kept(module, tuple(paths[id(module)]), graph, keep, rescaled)
        for kind, handler in HANDLERS:
            if isinstance(module, kind):
                handler(module, kept)
        libraries.resize(module, kept)
