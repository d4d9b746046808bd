"""Is it the same function? The checks themselves, with what passes and what does not."""

from typing import Any

import pytest
import torch
from model_zoo import Net, images, lenet, residual, vectors
from torch import Tensor, nn
from torch.nn import functional as F

from prunus.axes import Graph, Keep
from prunus.errors import InexactSurgery
from prunus.graph import analyse
from prunus.surgery import Exported, Inputs, check, mask_sites, prove, slice_model
from prunus.surgery.verify import TOLERANCE, max_rel_diff


def proven(model: nn.Module, *args: Any, form: str = "auto", **options: Any) -> Graph:
    return prove(model, analyse(model, args, **options), args, form)


def refused(graph: Graph) -> dict[str, str]:
    """The axes that proving froze, and why."""
    return {f.axis: f.operation for f in graph.frozen if f.operation.startswith("removal")}


def assert_its_operations_shrink(model: nn.Module, *args: Any, **options: Any) -> None:
    """What the model's own code cannot run without, its exported operations can: nothing frozen, and exact."""
    whole = analyse(model, args, **options)
    assert proven(model, *args, form="eager", **options).sizes != whole.sizes
    graph = proven(model, *args, **options)
    assert (graph.sizes, graph.form, refused(graph)) == (whole.sizes, "graph", {})
    assert graph == proven(model, *args, form="graph", **options)
    exported = Exported(model, Inputs.of(args), training=False)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        units = {name: torch.rand(size, generator=generator) < 0.6 for name, size in graph.sizes.items()}
        keep = Keep(graph, {name: mask for name, mask in units.items() if mask.any()}).closed()
        masked = mask_sites(graph, keep, dict(model.named_parameters()) | dict(model.named_buffers()))
        small = exported.shrunk(graph, keep, slice_model(model, graph, keep, form="graph"))
        assert check(model, masked, small, args)["ok"]
        assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


# ---- literals in the code --------------------------------------------------------------------------------------------


def test_a_literal_in_a_view_is_found_and_named() -> None:
    net = Net(lambda m, x: m.fc(m.conv(x).relu().view(-1, 8 * 49)), conv=nn.Conv2d(3, 8, 2), fc=nn.Linear(8 * 49, 4))
    assert_its_operations_shrink(net, *images(batch=2)())
    graph = proven(net, *images(batch=2)(), form="eager")
    assert list(graph.sizes) == ["fc.inputs"]  # an index selection does not change the view
    assert list(refused(graph)) == ["conv.weight[0]"]
    assert [f.module for f in graph.frozen if f.operation.startswith("removal")] == ["conv"]


def test_a_view_that_folds_maps_into_the_batch_is_found() -> None:
    """Half of the maps: the view takes two examples for one."""
    net = Net(lambda m, x: m.fc(m.conv(x).relu().view(-1, 2 * 49)), conv=nn.Conv2d(3, 2, 2), fc=nn.Linear(2 * 49, 4))
    assert_its_operations_shrink(net, *images(batch=2)(), units="groups")
    graph = proven(net, *images(batch=2)(), units="groups", form="eager")
    assert list(graph.sizes) == []
    assert "removal does not run (RuntimeError" in refused(graph)["conv.weight[0]"]


def shuffle(groups: int | None, per_group: int | None) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        n, c, h, w = x.shape
        split = (groups, c // groups) if groups else (c // (per_group or 1), per_group)
        return m.b(x.view(n, *split, h, w).transpose(1, 2).reshape(n, c, h, w))

    return Net(forward, a=nn.Conv2d(3, 24, 3), b=nn.Conv2d(24, 2, 1))


@pytest.mark.parametrize("groups, per_group, stays", [(4, None, "a#2"), (None, 4, "a")])
def test_a_channel_shuffle_with_a_literal_is_silently_wrong_and_named(groups: Any, per_group: Any, stays: str) -> None:
    net = shuffle(groups, per_group)
    before = analyse(net, images()())
    assert set(before.sizes) == {"a", "a#2"}
    assert_its_operations_shrink(net, *images()())
    graph = proven(net, *images()(), form="eager")
    assert (list(graph.sizes), graph.form) == ([stays], "eager")
    assert len(refused(graph)) == 1
    keep = Keep(graph, {stays: torch.arange(graph.sizes[stays]) % 2 == 0})
    args = images()()
    masked = mask_sites(graph, keep, dict(net.named_parameters()))
    assert check(net, masked, slice_model(net, graph, keep), args)["ok"]


def test_the_wrong_half_of_a_shuffle_runs_and_is_refused_by_the_check() -> None:
    """What proving guards against: the right shape and other numbers."""
    net = shuffle(4, None)
    graph = analyse(net, images()())
    keep = Keep(graph, {"a": torch.tensor([True, False, True, False])})
    assert graph.sizes["a"] == 4
    small = slice_model(net, graph, keep)
    assert small(*images()()).shape == net(*images()()).shape
    with pytest.raises(InexactSurgery, match="so it is refused"):
        check(net, mask_sites(graph, keep, dict(net.named_parameters())), small, images()())


def test_a_literal_split_is_found() -> None:
    net = Net(
        lambda m, x: m.b(F.relu(m.a(x)).view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)),
        a=nn.Linear(6, 8),
        b=nn.Linear(8, 4),
    )
    assert_its_operations_shrink(net, *vectors()(), units="groups")
    graph = proven(net, *vectors()(), units="groups", form="eager")
    assert list(graph.sizes) == []
    assert list(refused(graph)) == ["a.weight[0]"]


def test_a_zero_weight_hides_no_error() -> None:
    """A layer that starts at zero, as residual branches do: the shuffle before it is wrong all the same."""
    net = shuffle(4, None)
    nn.init.zeros_(net.get_parameter("b.weight"))
    assert list(proven(net, *images()(), form="eager").sizes) == ["a#2"]
    assert proven(net, *images()()).sizes == {"a": 4, "a#2": 6}


def test_fresh_batch_norms_hide_no_error() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        n, c, h, w = x.shape
        return m.b(m.bn(x).view(n, 4, c // 4, h, w).transpose(1, 2).reshape(n, c, h, w))

    net = Net(forward, a=nn.Conv2d(3, 24, 3), bn=nn.BatchNorm2d(24), b=nn.Conv2d(24, 2, 1))
    assert list(proven(net, *images()(), form="eager").sizes) == ["a#2"]
    assert_its_operations_shrink(net, *images()())


def test_dropout_that_never_stops_proves_nothing() -> None:
    net = Net(lambda m, x: m.b(F.dropout(m.a(x), 0.5)), a=nn.Linear(60, 80), b=nn.Linear(80, 4))
    assert list(proven(net, *vectors(60)(), units="groups").sizes) == []


# ---- what passes -----------------------------------------------------------------------------------------------------


def test_proving_leaves_what_is_right_and_the_model_alone() -> None:
    net = lenet()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    graph = analyse(net, images(1, 28)())
    for form in ("auto", "eager"):
        assert prove(net, graph, images(1, 28)(), form) == graph
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.training


def test_a_model_that_insists_on_its_precision_is_tried_in_it() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(F.relu(m.a(x.float()) + torch.zeros(1, dtype=torch.float32)))

    net = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 4))
    assert list(proven(net, *vectors()(), units="groups").sizes) == ["a"]


@pytest.mark.parametrize(
    "finish",
    [lambda y: (y, y > 0), lambda y: (y, y.argmax(1)), lambda y: torch.complex(y, 2 * y), lambda y: {"y": [y, None]}],
    ids=["booleans", "integers", "complex numbers", "nothing"],
)
def test_outputs_of_any_kind_are_compared(finish: Any) -> None:
    net = Net(lambda m, x: finish(m.b(F.relu(m.a(x)))), a=nn.Linear(6, 8), b=nn.Linear(8, 4))
    graph = proven(net, *vectors()(), units="groups")
    assert list(graph.sizes) == ["a"]
    keep = Keep(graph, {"a": torch.arange(8) > 2})
    small = slice_model(net, graph, keep)
    masked = mask_sites(graph, keep, dict(net.named_parameters()))
    assert check(net, masked, small, vectors()())["ok"]
    with torch.no_grad():
        small.get_parameter("b.bias").add_(0.5)
    with pytest.raises(InexactSurgery):
        check(net, masked, small, vectors()())


def test_an_imaginary_part_alone_is_compared_too() -> None:
    a = torch.tensor([1 + 1j, 2 + 0j])
    assert max_rel_diff([a], [a + 1j]) == pytest.approx(0.5)
    assert max_rel_diff([a], [a.conj().conj()]) == 0


def test_differences_are_relative_to_the_largest_output() -> None:
    a = torch.tensor([4.0, -8.0])
    assert max_rel_diff([a], [a + torch.tensor([0.0, 0.8])]) == pytest.approx(0.1)
    assert max_rel_diff([a, a * 100], [a * 1.5, a * 100]) == pytest.approx(0.5)
    assert max_rel_diff([], []) == 0
    assert max_rel_diff([torch.empty(0, 3)], [torch.empty(0, 3)]) == 0
    assert max_rel_diff([torch.zeros(2)], [torch.zeros(2)]) == 0


@pytest.mark.parametrize(
    "other",
    [[], [torch.ones(3)], [torch.ones(1, 2)], [torch.tensor([1.0, float("nan")])], [torch.tensor([1.0, float("inf")])]],
    ids=["fewer", "longer", "other shape", "nan", "inf"],
)
def test_what_cannot_be_compared_is_infinitely_wrong(other: list[Tensor]) -> None:
    assert max_rel_diff([torch.ones(2)], other) == float("inf")
    assert max_rel_diff([torch.tensor([1.0, float("nan")])], [torch.tensor([1.0, float("nan")])]) == float("inf")


def sliced(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Tensor], nn.Module, Tensor]:
    net = residual().to(dtype)
    x = images()()[0].to(dtype)
    graph = analyse(net, (x,))
    keep = Keep(graph, {"stem": torch.arange(6) < 4, "conv1": torch.arange(5) > 1})
    masked = mask_sites(graph, keep, dict(net.named_parameters()) | dict(net.named_buffers()))
    return net, masked, slice_model(net, graph, keep), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_right_model_passes_in_every_precision(dtype: torch.dtype) -> None:
    net, masked, small, x = sliced(dtype)
    result = check(net, masked, small, x)
    assert result["ok"]
    assert result["max_rel_diff"] <= TOLERANCE == result["tolerance"]
    assert result["inputs"] == 4
    assert small.get_parameter("head.weight").dtype == dtype  # the comparison worked on copies
    assert net.training
    assert small.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slightly_wrong_model_is_refused(dtype: torch.dtype) -> None:
    net, masked, small, x = sliced(dtype)
    with torch.no_grad():
        small.get_parameter("head.weight")[0, 0] += 0.05
    with pytest.raises(InexactSurgery, match=r"differs from the gated one by .* \(allowed: 1e-05\)"):
        check(net, masked, small, x)


def test_an_error_that_the_users_input_hides_is_found_on_random_ones() -> None:
    net, masked, small, x = sliced()
    with torch.no_grad():
        small.get_parameter("stem.weight")[0] += 0.5
    x = torch.zeros_like(x)
    with pytest.raises(InexactSurgery):
        check(net, masked, small, x)
    assert check(net, masked, small, x, random=0)["ok"]


# ---- inputs ----------------------------------------------------------------------------------------------------------


def test_inputs_are_read_as_users_give_them() -> None:
    x = torch.ones(2)
    assert Inputs.of(x) == Inputs((x,), {})
    assert Inputs.of((x, 3)).args == (x, 3)
    assert Inputs.of([x]).args == (x,)
    assert Inputs.of({"a": x}).kwargs == {"a": x}
    again = Inputs.of(({"a": x},))
    assert Inputs.of(again) is again


def test_random_inputs_change_floats_alone() -> None:
    inputs = Inputs((torch.zeros(3, dtype=torch.bfloat16), {"n": torch.arange(3)}), {"m": torch.tensor([True]), "k": 4})
    one, two, other = inputs.random(1), inputs.random(1), inputs.random(2)
    assert torch.equal(one.args[0], two.args[0])
    assert not torch.equal(one.args[0], other.args[0])
    assert one.args[0].dtype == torch.bfloat16
    assert torch.equal(one.args[1]["n"], torch.arange(3))
    assert (bool(one.kwargs["m"]), one.kwargs["k"]) == (True, 4)
    wide = inputs.to(torch.float64)
    assert (wide.args[0].dtype, wide.args[1]["n"].dtype) == (torch.float64, torch.int64)


# ---- proving is not left to chance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64])
def test_halves_that_lose_as_many_by_chance_prove_nothing(half: int) -> None:
    """Code that cuts in the middle runs where both halves keep as many units, and there alone."""
    net = Net(
        lambda m, x: m.b(m.a(x).relu().chunk(2, -1)[0]) + m.c(m.a(x).relu().chunk(2, -1)[1]),
        a=nn.Linear(6, 2 * half), b=nn.Linear(half, 4), c=nn.Linear(half, 4),
    )  # fmt: skip
    assert analyse(net, vectors()(), units="groups").sizes == {"a": half, "a#2": half}
    graph = proven(net, *vectors()(), units="groups")
    assert (graph.sizes, graph.form) == ({"a": half, "a#2": half}, "graph")
    alone = {"a#2": 2} if half == 2 else {}  # with the first half whole, three cut in the middle are two and one
    assert proven(net, *vectors()(), units="groups", form="eager").sizes == alone
