"""Reading budgets: limits, lines, and which tensors a line counts."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
from budget_models import LeNet, small_gated
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from prunus.axes import Graph
from prunus.budget import Limit, Line, parse, read_lines
from prunus.budget.lines import WHATS, chooser, read_limit
from prunus.cost import Row
from prunus.errors import BudgetError


def refused(sentence: str, read: Any, *args: Any) -> str:
    """Refused with one plain sentence that holds `sentence`."""
    with pytest.raises(BudgetError) as caught:
        read(*args)
    said = str(caught.value)
    assert sentence in said
    assert said.endswith(".")
    assert "\n" not in said
    assert caught.value.exit_code == 2
    return said


# ---- limits ----------------------------------------------------------------------------------------------------------

FRACTIONS: list[tuple[Any, float]] = [
    (0.1, 0.1),
    (1.0, 1.0),
    (1e-9, 1e-9),
    ("10%", 0.1),
    ("100%", 1.0),
    (" 2.5 % ", 0.025),
    ("+5%", 0.05),
    (".5%", 0.005),
    ("1e-3%", 1e-5),
    ("0.25", 0.25),
    (".25", 0.25),
    ("1.0", 1.0),
    ("2.5e-1", 0.25),
]


@pytest.mark.parametrize("value, wanted", FRACTIONS)
@pytest.mark.parametrize("what", WHATS)
def test_fractions_of_every_measure(what: str, value: Any, wanted: float) -> None:
    limit = read_limit(value, what, what)
    assert limit.is_fraction
    assert limit.value == pytest.approx(wanted, rel=1e-15)


COUNTS: list[tuple[Any, float]] = [
    (1, 1),
    (100_000, 100_000),
    (2**70, 2.0**70),
    ("1", 1),
    ("+7", 7),
    ("1_000", 1000),
    ("100k", 100_000),
    ("100K", 100_000),
    ("1.5k", 1500),
    ("0.5k", 500),
    ("2 M", 2_000_000),
    ("2m", 2_000_000),
    ("1.25G", 1_250_000_000),
    ("1B", 10**9),
    ("1e2k", 100_000),
]


@pytest.mark.parametrize("value, wanted", COUNTS)
@pytest.mark.parametrize("what", ["params", "macs"])
def test_counts(what: str, value: Any, wanted: float) -> None:
    assert read_limit(value, what, what) == Limit(wanted, False)


SIZES: list[tuple[Any, float]] = [
    (4_000_000, 4e6),
    ("4000000", 4e6),
    ("512B", 512),
    ("4kB", 4000),
    ("4MB", 4e6),
    ("4mb", 4e6),
    ("0.5GB", 5e8),
    ("4KiB", 4096),
    ("4 MiB", 4 * 2**20),
    ("1.5GiB", 1.5 * 2**30),
]


@pytest.mark.parametrize("value, wanted", SIZES)
def test_sizes(value: Any, wanted: float) -> None:
    assert read_limit(value, "bytes", "bytes") == Limit(wanted, False)


def test_a_whole_number_counts_and_a_number_with_a_point_is_a_fraction() -> None:
    assert read_limit(1, "params", "params") == Limit(1.0, False)
    assert read_limit(1.0, "params", "params") == Limit(1.0, True)
    assert read_limit("1", "params", "params") == Limit(1.0, False)
    assert read_limit("1.0", "params", "params") == Limit(1.0, True)


WRONG: list[tuple[Any, str, str]] = [
    (0, "params", "params=0 must be above zero"),
    (-5, "params", "params=-5 must be above zero"),
    (0.0, "params", "params=0 must be above zero"),
    (-0.1, "macs", "macs=-0.1 must be above zero"),
    ("0", "params", "params=0 must be above zero"),
    ("0%", "params", "params=0% must be above zero"),
    ("-10%", "params", "params=-10% must be above zero"),
    ("-10k", "params", "params=-10k must be above zero"),
    ("0MB", "bytes", "bytes=0MB must be above zero"),
    (1.5, "params", "params=1.5 is over 100% of the dense model"),
    (2.0, "density", "density=2 is over 100% of the dense model"),
    ("101%", "params", "params=101% is over 100% of the dense model"),
    ("100.0001%", "params", "is over 100% of the dense model"),
    ("1.5", "params", "params=1.5 is over 100% of the dense model"),
    ("10q", "params", "params=10q has the unknown unit 'q'; known for params: %, k, M, G"),
    ("4MB", "params", "params=4MB has the unknown unit 'MB'; known for params: %, k, M, G"),
    ("4MiB", "macs", "macs=4MiB has the unknown unit 'MiB'; known for macs: %, k, M, G"),
    ("4k", "bytes", "bytes=4k has the unknown unit 'k'; known for bytes: %, B, kB, MB, GB, KiB, MiB, GiB"),
    ("ten", "params", "params=ten cannot be read; write a fraction of the dense model such as 10% or 0.1"),
    ("10%%", "params", "params=10%% has the unknown unit '%%'"),
    ("1,000", "params", "params=1,000 cannot be read"),
    ("1.2.3", "params", "cannot be read"),
    ("", "bytes", "cannot be read; write a fraction of the dense model such as 10% or 0.1, or an absolute number such "
     "as 4MB"),
    ("nan", "params", "params=nan cannot be read"),
    ("inf%", "params", "params=inf% cannot be read"),
    (math.nan, "params", "params=nan is no finite number"),
    (math.inf, "params", "params=inf is no finite number"),
    (-math.inf, "macs", "macs=-inf is no finite number"),
    (10**400, "params", "params is no finite number"),
    ("1e400k", "params", "params is no finite number"),
    ("1e400", "params", "params=1e400 is no finite number"),
    ("9" * 400, "params", "params is no finite number"),
    (True, "params", "params is True, which is no number"),
    (None, "params", "params is None, which is no number"),
    ([0.1], "params", "params is [0.1], which is no number"),
    (3, "density", "density counts in the papers' density, a fraction: write 10% or 0.1"),
    ("3", "density", "density counts in the papers' density, a fraction: write 10% or 0.1"),
    ("3k", "density", "density counts in the papers' density, a fraction: write 10% or 0.1"),
]  # fmt: skip


@pytest.mark.parametrize("value, what, sentence", WRONG)
def test_wrong_limits_are_refused_with_a_sentence(value: Any, what: str, sentence: str) -> None:
    said = refused(sentence, read_limit, value, what, what)
    assert what in said


# ---- lines -----------------------------------------------------------------------------------------------------------


def test_lines_as_the_command_line_writes_them() -> None:
    lines = parse(
        ["params=10%", " macs = 30% ", "bytes=4MB", "density=0.5", "layer:conv1=50%", "layer:fc*:macs=2k",
         "layer:block.0:bytes=1KiB", "layer:conv1:density=7%"]
    )  # fmt: skip
    assert lines == (
        Line("params", None, Limit(0.1, True)),
        Line("macs", None, Limit(0.3, True)),
        Line("bytes", None, Limit(4e6, False)),
        Line("density", None, Limit(0.5, True)),
        Line("params", "conv1", Limit(0.5, True)),
        Line("macs", "fc*", Limit(2000, False)),
        Line("bytes", "block.0", Limit(1024, False)),
        Line("density", "conv1", Limit(0.07, True)),
    )
    assert [line.name for line in lines] == [
        "params", "macs", "bytes", "density", "layer:conv1", "layer:fc*:macs", "layer:block.0:bytes",
        "layer:conv1:density",
    ]  # fmt: skip
    assert [line.row for line in lines][4:6] == [Row("params", "conv1"), Row("macs", "fc*")]


def test_a_layers_parameters_may_be_named_or_not() -> None:
    assert parse(["layer:conv1=50%"]) == parse(["layer:conv1:params=50%"]) == parse(["layer:conv1:=50%"])


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("params", "'params' has no limit; write for instance params=10%"),
        ("params=", "'params=' has no limit"),
        ("", "'' has no limit"),
        ("=10%", "counts '', which is nothing Prunus can count"),
        ("parms=10%", "counts 'parms', which is nothing Prunus can count; nearest: params"),
        ("flops=10%", "there are: params, macs, bytes, density. A layer's budget is written layer:NAME=50%"),
        ("conv1=10%", "A layer's budget is written layer:NAME=50%"),
        ("layer:=10%", "names no layer; write for instance layer:conv1=50%"),
        ("layer::macs=10%", "names no layer"),
        ("layer:conv1:mac=10%", "counts 'mac', which is nothing Prunus can count; nearest: macs"),
        ("layer:conv1=150%", "layer:conv1=150% is over 100%"),
        ("params=10%=3", "cannot be read"),
    ],
)
def test_wrong_lines_are_refused_with_a_sentence(text: str, sentence: str) -> None:
    refused(sentence, parse, [text])


def test_two_lines_that_contradict_each_other_are_refused() -> None:
    sentence = "Two budgets contradict each other: params=10% and params=20%. Keep one of them"
    refused(sentence, parse, ["params=10%", "macs=5%", "params=20%"])
    refused("layer:conv1=10% and layer:conv1=1,000", parse, ["layer:conv1=10%", "layer:conv1:params=1k"])
    refused("layer:a:density=10% and layer:a:density=20%", read_lines, {"density": {"a": 0.1}}, {"a": {"density": 0.2}})


def test_the_same_line_twice_counts_once() -> None:
    assert parse(["params=10%", "macs=1k", "params=0.1", "macs=1000"]) == parse(["params=10%", "macs=1000"])
    assert read_lines({"density": {"a": 0.1}}, {"a": {"density": "10%"}}) == parse(["layer:a:density=10%"])


def test_one_measure_of_several_layers_is_no_contradiction() -> None:
    assert len(parse(["params=10%", "layer:a=10%", "layer:b=20%", "layer:a:macs=30%"])) == 4


def test_no_line_at_all_is_refused() -> None:
    for totals, layers in (({}, None), ({"params": None}, {}), ({"density": {}}, None)):
        refused("needs at least one limit: params=, macs=, bytes=, density= or layers=", read_lines, totals, layers)
    refused("needs at least one limit", parse, [])


TOTALS: list[tuple[Mapping[str, Any], Mapping[str, Any] | None, list[str]]] = [
    (
        {"params": 0.1, "macs": "30%", "bytes": 4000, "density": 0.5},
        None,
        ["params=10%", "macs=30%", "bytes=4,000", "density=50%"],
    ),
    (
        {"params": None, "density": {"conv1": 0.5, "fc*": "7%"}},
        None,
        ["layer:conv1:density=50%", "layer:fc*:density=7%"],
    ),
    (
        {},
        {"conv1": 0.5, "fc*": {"macs": 0.3, "bytes": "1kB"}},
        ["layer:conv1=50%", "layer:fc*:macs=30%", "layer:fc*:bytes=1,000"],
    ),
    (
        {"macs": 3},
        {"conv1": {"params": 20, "density": 0.1}},
        ["macs=3", "layer:conv1=20", "layer:conv1:density=10%"],
    ),
]


@pytest.mark.parametrize("totals, layers, wanted", TOTALS)
def test_lines_as_python_writes_them(
    totals: Mapping[str, Any], layers: Mapping[str, Any] | None, wanted: list[str]
) -> None:
    lines = read_lines(totals, layers)
    assert [str(line) for line in lines] == wanted
    assert lines == parse([text.replace(",", "") for text in wanted])


@pytest.mark.parametrize(
    "totals, layers, sentence",
    [
        ({}, [0.5], "layers is [0.5]; write the limits by layer, for instance {'conv1': 0.5}"),
        ({}, 0.5, "layers is 0.5; write the limits by layer"),
        ({}, {"conv1": {"flops": 0.5}}, "The budget of layer conv1 counts 'flops'; there are: params, macs"),
        ({}, {"conv1": {"param": 0.5}}, "The budget of layer conv1 counts 'param'; nearest: params"),
        ({}, {"conv1": 7.0}, "layer:conv1=7 is over 100%"),
        ({}, {"conv1": {"density": 7}}, "layer:conv1:density counts in the papers' density"),
        ({"density": {"conv1": "7"}}, None, "layer:conv1:density counts in the papers' density"),
        ({"params": {"conv1": 0.5}}, None, "params is {'conv1': 0.5}, which is no number"),
    ],
)
def test_wrong_python_lines_are_refused_with_a_sentence(totals: Any, layers: Any, sentence: str) -> None:
    refused(sentence, read_lines, totals, layers)


# ---- and back --------------------------------------------------------------------------------------------------------

NAMES = ["params", "macs", "bytes", "density", "layer:conv1", "layer:fc*:macs", "layer:a.b:bytes", "layer:x:density"]


def written(line: Line) -> str:
    """As a run's checkpoint keeps it and the command line reads it again."""
    return str(line).replace(",", "")


@given(st.sampled_from(NAMES), st.integers(1, 999_999), st.integers(-4, 8))
@example("params", 1, 0)
@example("params", 100_000, 3)
@settings(max_examples=150, deadline=None)
def test_a_percentage_of_up_to_six_digits_reads_back_as_it_was(name: str, digits: int, places: int) -> None:
    text = f"{digits}e-{places}" if places > 0 else f"{digits}e+{-places}"
    if float(text) > 100:
        text = f"{digits}e-4"
    (line,) = parse([f"{name}={text}%"])
    assert parse([written(line)]) == (line,)


@given(st.sampled_from([name for name in NAMES if "density" not in name]), st.integers(1, 2**53))
@example("params", 1)
@example("bytes", 2**53)
@settings(max_examples=100, deadline=None)
def test_a_whole_number_reads_back_as_it_was(name: str, number: int) -> None:
    (line,) = parse([f"{name}={number}"])
    assert line.limit == Limit(float(number), False)
    assert parse([written(line)]) == (line,)


def test_whole_percentages_given_as_fractions_read_back_as_they_were() -> None:
    for percent in range(1, 101):
        (line,) = read_lines({"params": percent / 100})
        assert str(line) == f"params={percent}%"
        assert parse([written(line)]) == (line,)


@given(st.floats(1e-9, 1.0))
@settings(max_examples=100, deadline=None)
def test_any_fraction_reads_back_as_nearly_what_it_was(fraction: float) -> None:
    (line,) = read_lines({"macs": fraction})
    (again,) = parse([written(line)])
    assert again.limit.is_fraction
    assert again.limit.value == pytest.approx(fraction, rel=5.1e-6)


# ---- which tensors a line counts -------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Modules in modules."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(LeNet(), nn.Linear(3, 2))


@pytest.fixture(scope="module")
def lenet() -> Graph:
    return small_gated("lenet").graph


@pytest.mark.parametrize(
    "where, wanted",
    [
        (None, {"conv1", "conv2", "fc1", "fc2"}),
        ("*", {"conv1", "conv2", "fc1", "fc2"}),
        ("conv1", {"conv1"}),
        ("conv*", {"conv1", "conv2"}),
        ("*1", {"conv1", "fc1"}),
        ("fc[2]", {"fc2"}),
    ],
)
def test_a_line_counts_the_tensors_of_its_layers(lenet: Graph, where: str | None, wanted: set[str]) -> None:
    counts = chooser(lenet, Line("params", where, Limit(0.5, True)))
    tensors = {f"{layer}.{leaf}" for layer in ("conv1", "conv2", "fc1", "fc2") for leaf in ("weight", "bias")}
    assert set(lenet.tensors) == tensors
    assert {tensor for tensor in tensors if counts(tensor)} == {t for t in tensors if t.split(".")[0] in wanted}


def test_a_module_that_holds_others_names_them_all() -> None:
    names = [name for name, _ in Nested().named_parameters()]
    graph = Graph({}, (), tensors=dict.fromkeys(names))  # type: ignore[arg-type]
    counts = chooser(graph, Line("macs", "block", Limit(0.5, True)))
    assert all(counts(name) for name in names)
    inner = chooser(graph, Line("macs", "block.0", Limit(0.5, True)))
    assert {name for name in names if not inner(name)} == {"block.1.weight", "block.1.bias"}


@pytest.mark.parametrize(
    "where, offered",
    [
        ("conv11", "nearest: conv1"),
        ("fc", "nearest: fc2, fc1"),
        ("zzz", "there are: conv1, conv2, fc1, fc2"),
        ("conv1.weight", "there are: conv1, conv2, fc1, fc2"),
        ("onv*", "nearest: conv"),
    ],
)
def test_an_unknown_layer_is_refused_and_the_nearest_are_offered(lenet: Graph, where: str, offered: str) -> None:
    line = Line("macs", where, Limit(0.5, True))
    said = refused(f"names the layer {where!r}, which this model does not have", chooser, lenet, line)
    assert str(line) in said
    assert offered in said
