"""Errors planted in surgery on the zoo: the proof must see them, in the models' own code and in their operations."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo_models import ZOO
from zoo_prepared import EVERYTHING, analysed, both_forms, dense, trial_of

import prunus.surgery.slicing as slicing
from prunus.axes import Axis, Graph, Group, Keep
from prunus.surgery import mask_sites, rewrite


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def places(index: Tensor, size: int, how: str) -> Tensor:
    """Wrong places: each kept one's neighbour, or the first two in each other's place."""
    if how == "shifted":
        return ((index + 1) % size).sort().values
    return torch.cat([index[:2].flip(0), index[2:]])


def plant(monkeypatch: pytest.MonkeyPatch, axis: Axis, how: str) -> None:
    """One weight keeps wrong places along one dimension."""
    right = slicing.kept_indices

    def wrong(graph: Graph, keep: Keep) -> dict[str, list[Tensor | None]]:
        result = right(graph, keep)
        index = result[axis.tensor][axis.dim]
        assert index is not None
        result[axis.tensor][axis.dim] = places(index, axis.term.size, how)
        return result

    monkeypatch.setattr(slicing, "kept_indices", wrong)


def first_half(graph: Graph, group: Group) -> Keep:
    return Keep(graph, {group.name: torch.arange(group.size) < max(1, group.size // 2)}).closed()


def truly_equal(name: str, graph: Graph, keep: Keep, axis: Axis, how: str) -> bool:
    """Does the planted error change nothing, computed at full size, with the wrong weights at the kept places?"""
    trial = trial_of(name, "eager")
    tensors = dict(trial.model.named_parameters()) | dict(trial.model.named_buffers())
    weights = mask_sites(graph, keep, tensors)
    right = trial.run(trial.model, weights)
    index = keep.positions(axis.term).nonzero().flatten()
    wrong = tensors[axis.tensor].index_select(axis.dim, places(index, axis.term.size, how))
    weights[axis.tensor] = weights[axis.tensor].index_copy(axis.dim, index, wrong)
    return all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-14)
        for a, b in zip(right, trial.run(trial.model, weights), strict=True)
    )


def found(
    monkeypatch: pytest.MonkeyPatch, name: str, form: str, how: str, units: Any, groups: int | None
) -> Counter[str]:
    """Plant an error at every reader of some groups in turn; count what is seen, and what is no error."""
    graph, trial = analysed(name, units)[0], trial_of(name, form)
    result: Counter[str] = Counter()
    for group in graph.groups[:groups]:
        keep = first_half(graph, group)
        assert trial.differs(graph, keep) is None  # without an error it is equal
        for axis in group.consumers:
            if int(keep.positions(axis.term).sum()) < 2 and how == "exchanged":
                continue
            with monkeypatch.context() as patch:
                plant(patch, axis, how)
                why = trial.differs(graph, keep)
            if why is not None:
                result["seen"] += 1
            else:
                result["equal" if truly_equal(name, graph, keep, axis, how) else f"missed {group.name} {axis}"] += 1
    return result


@both_forms([name for name in ZOO if name != "control_flow"])
def test_a_reader_of_wrong_units_is_seen_in_every_model(monkeypatch: pytest.MonkeyPatch, name: str, form: str) -> None:
    result = found(monkeypatch, name, form, "shifted", "structured", 1)
    assert set(result) == {"seen"}


GROUP_BY_GROUP = [("resnet18", "eager"), ("densenet", "eager"), ("vit", "graph"), ("hf_llama", "graph")]
READERS = {"resnet18": 20, "densenet": 34, "vit": 4, "hf_llama": 6}
SLOW = [("resnet18", "graph"), ("densenet", "graph"), ("hf_llama", "eager")]


@pytest.mark.parametrize(
    "name, form", [*GROUP_BY_GROUP, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_a_reader_of_wrong_units_is_seen_in_every_group(monkeypatch: pytest.MonkeyPatch, name: str, form: str) -> None:
    result = found(monkeypatch, name, form, "shifted", "structured", None)
    assert result == {"seen": READERS[name]}


@pytest.mark.slow
@pytest.mark.parametrize("name, form", [*GROUP_BY_GROUP, *SLOW])
def test_two_exchanged_units_are_seen_in_every_group_unless_both_are_dead(
    monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    result = found(monkeypatch, name, form, "exchanged", "structured", None)
    assert set(result) <= {"seen", "equal"}
    assert result["equal"] <= result["seen"] // 6


# ---- literals of the exported operations -----------------------------------------------------------------------------


def rotated_split(patch: pytest.MonkeyPatch) -> None:
    right = rewrite.Rewriting._split

    def wrong(self: Any, node: Any, fx: Any, out: Any) -> None:
        right(self, node, fx, out)
        sizes = list(fx.args[1]) if isinstance(fx.args[1], list) else []
        if len(sizes) > 1:
            fx.update_arg(1, [sizes[0] + 1, *sizes[1:-1], sizes[-1] - 1])

    patch.setattr(rewrite.Rewriting, "_split", wrong)


def further_slice(patch: pytest.MonkeyPatch) -> None:
    right = rewrite.OTHERS["slice"]

    def wrong(r: Any, node: Any, fx: Any, out: Any) -> None:
        before = fx.args
        right(r, node, fx, out)
        if fx.args != before and fx.args[2] > 0:
            fx.args = (*fx.args[:2], fx.args[2] - 1, fx.args[3] - 1)

    patch.setitem(rewrite.OTHERS, "slice", wrong)


def further_pad(patch: pytest.MonkeyPatch) -> None:
    right = rewrite.OTHERS["pad"]

    def wrong(r: Any, node: Any, fx: Any, out: Any) -> None:
        right(r, node, fx, out)
        amounts = list(fx.args[1])
        for k in range(0, len(amounts), 2):
            if r.shrinks(out[len(out) - 1 - k // 2]) and amounts[k + 1] > 0:
                amounts[k : k + 2] = [amounts[k] + 1, amounts[k + 1] - 1]
        fx.update_arg(1, amounts)

    for name in ("pad", "constant_pad_nd"):
        patch.setitem(rewrite.OTHERS, name, wrong)


def nothing(operation: str) -> Any:
    def wrong(patch: pytest.MonkeyPatch) -> None:
        patch.setitem(rewrite.OTHERS, operation, lambda r, node, fx, out: None)

    return wrong


def all_groups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rewrite.Rewriting, "_groups", lambda self, node, fx: None)


def wrong_sizes(patch: pytest.MonkeyPatch) -> None:
    """Views exchange the two dimensions that heads and their dimensions are told apart by."""
    right = rewrite.Rewriting._sizes

    def wrong(self: Any, fx: Any, place: int, out: Any) -> None:
        right(self, fx, place, out)
        sizes = list(fx.args[place])
        whole = [k for k, size in enumerate(sizes) if isinstance(size, int) and size > 1]
        if len(whole) > 1 and self.shrinks(out[whole[-2]]):
            sizes[whole[-2]], sizes[whole[-1]] = sizes[whole[-1]], sizes[whole[-2]]
        fx.update_arg(place, sizes)

    patch.setattr(rewrite.Rewriting, "_sizes", wrong)


LITERALS = {
    "a split one off": ("einsum_attention", "structured", rotated_split),
    "a split of packed weights one off": ("hf_gpt2", "structured", rotated_split),
    "a chunk one off": ("glu_mlp", "structured", rotated_split),
    "a slice one off": ("hf_llama", EVERYTHING, further_slice),
    "a pad one off": ("resnet_padded", "structured", further_pad),
    "as many convolution groups as before": ("regnet", "structured", all_groups),
    "as many norm groups as before": ("unet_groupnorm", "structured", nothing("group_norm")),
    "attention scaled by what is left": ("vit", EVERYTHING, nothing("scaled_dot_product_attention")),
    "a mean over what is left": ("rms_net", EVERYTHING, nothing("mean")),
    "another model's mean over what is left": ("hf_llama", EVERYTHING, nothing("mean")),
    "dimensions exchanged": ("vit_explicit", "structured", wrong_sizes),
}


@pytest.mark.parametrize("what", LITERALS)
def test_a_wrong_number_in_an_operation_is_seen(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    name, units, wrong = LITERALS[what]
    graph, trial = analysed(name, units)[0], trial_of(name, "graph")
    units_ = {n: torch.arange(size) % 3 > 0 if size > 2 else torch.arange(size) > 0 for n, size in graph.sizes.items()}
    keep = Keep(graph, units_).closed()
    assert trial.differs(graph, keep) is None
    assert all(not p.requires_grad for p in trial.model.parameters())
    with monkeypatch.context() as patch:
        wrong(patch)
        assert trial.differs(graph, keep) is not None
    assert trial.differs(graph, keep) is None
    assert dense(name) is not trial.model
