"""The file of a shrunk model: what is in it, that it comes back, and that nothing else is let in."""

import copy
import errno
import itertools
import json
import math
import os
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_zoo import CASES, Case, Net, images, lenet, mlp, residual, vectors
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import prunus
from prunus import sealed
from prunus.axes import Graph
from prunus.errors import ArtefactError, ModelError, OutputError
from prunus.front import analyse_and_prove
from prunus.gated import Gated
from prunus.surgery import Exported, Inputs, Program, SelectedLinear, slice_model
from prunus.surgery.artefact import plan_of
from prunus.surgery.verify import max_rel_diff, outputs

ZOO = {case.name: case for case in CASES}
ZOO["mlp blocks"] = replace(ZOO["mlp weights"], name="mlp blocks", units="5x3")
ZOO["mlp 2:4"] = replace(ZOO["mlp weights"], name="mlp 2:4", units="2:4")
CASES = list(ZOO.values())
WEIGHTS = ("mlp weights", "mlp blocks", "mlp 2:4")


@cache
def analysed(name: str) -> tuple[nn.Module, Graph]:
    case = ZOO[name]
    torch.manual_seed(1)
    model = case.make()
    for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and tensor.dim() == 1:  # norms as after training
            tensor.data.uniform_(0.5, 1.5) if tensor_name.endswith("var") else tensor.data.normal_()
    return model, analyse_and_prove(model, Inputs(case.args(), case.kwargs()), units=case.units)


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> Inputs:
    return Inputs(ZOO[name].args(), ZOO[name].kwargs()).random(5).to(dtype)


def small_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Gated, nn.Module]:
    """A gated model whose gates stand anywhere, and its slice, as operations where its own code holds sizes."""
    model, graph = analysed(name)
    if dtype != torch.float32:
        case = ZOO[name]
        model = copy.deepcopy(model).to(dtype)
        graph = analyse_and_prove(model, Inputs(case.args(), case.kwargs()).to(dtype), units=case.units)
    gated = Gated(copy.deepcopy(model), graph)
    with torch.no_grad():
        gated.log_alpha.copy_(2 * torch.randn(gated.units, generator=torch.Generator().manual_seed(seed)) - 1)
    keep = gated.keep()
    small = slice_model(gated.model, graph, keep, gated.fold(), graph.form)
    inputs = inputs_of(name, dtype)
    if graph.form == "graph":
        small = Exported(gated.model, inputs).shrunk(graph, keep, small)
    small.prunus_plan = plan_of(graph, keep, graph.form, inputs)  # type: ignore[assignment]
    return gated, small


def fresh(name: str) -> nn.Module:
    torch.manual_seed(99)
    return ZOO[name].make()


def alike(a: nn.Module, b: nn.Module) -> None:
    """The same tensors to the bit, in the same places, and shared where they are shared."""
    one, two = a.state_dict(keep_vars=True), b.state_dict(keep_vars=True)
    assert list(one) == list(two)
    for name in one:
        assert one[name].dtype == two[name].dtype
        assert torch.equal(one[name], two[name]), name
    assert [[one[m] is one[n] for m in one] for n in one] == [[two[m] is two[n] for m in two] for n in two]
    assert repr(a) == repr(b)


def metadata_in(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def plan_in(path: Path) -> Any:
    return json.loads(metadata_in(path)["prunus"])


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# ---- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_shrunk_model_comes_back_on_a_fresh_dense_one(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    for seed in range(2):
        gated, small = small_model(case.name, seed)
        prunus.save(small, path)
        dense = fresh(case.name)
        before = {name: value.clone() for name, value in dense.state_dict().items()}
        loaded = prunus.load(dense, path)
        alike(small, loaded)
        assert type(loaded) is (Program if gated.graph.form == "graph" else type(dense))
        x = inputs_of(case.name)
        assert max_rel_diff(outputs(small, x), outputs(loaded, x)) == 0
        assert max_rel_diff(outputs(gated.eval(), x), outputs(loaded, x)) < 1e-5
        for name, value in dense.state_dict().items():  # it works on a copy
            assert torch.equal(value, before[name])
        again = tmp_path / "again.safetensors"
        prunus.save(loaded, again)  # what was loaded can be saved, and is what was saved
        assert metadata_in(again) == metadata_in(path)
        alike(small, prunus.load(dense, again))
    assert listing(tmp_path) == ["again.safetensors", "small.safetensors"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_file_holds_the_weights_and_the_plan_and_nothing_else(case: Case, tmp_path: Path) -> None:
    gated, small = small_model(case.name, 3)
    path = tmp_path / "small.safetensors"
    prunus.save(small, path)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert set(metadata) == {"prunus"}
    assert json.loads(metadata["prunus"])["schema"] == 1
    expected = set(small.state_dict()) - set(gated.graph.aliases)
    assert set(header) == expected | {f"{name}:places" for name in gated.graph.scattered}
    assert len(raw) == 8 + length + max(entry["data_offsets"][1] for entry in header.values())
    stored = sum(tensor.numel() * tensor.element_size() for tensor in load_file(path).values())
    assert stored == len(raw) - 8 - length == gated.cost.of(gated.keep())["bytes"]


@pytest.mark.parametrize("name", ["lenet", "residual", "tied", *WEIGHTS])
def test_the_tensors_bytes_are_what_the_receipt_says(name: str, tmp_path: Path) -> None:
    case = ZOO[name]
    gated, _ = small_model(name, 1)
    small, receipt = prunus.shrink(gated, Inputs(case.args(), case.kwargs()), batches=())
    prunus.save(small, tmp_path / "small.safetensors")
    tensors = load_file(tmp_path / "small.safetensors")
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == receipt["deployed"]["bytes"]
    assert receipt["deployed"]["bytes"] < receipt["dense"]["bytes"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["residual", "lenet", *WEIGHTS, "tied"])
def test_the_precision_that_was_deployed_comes_back(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    _, small = small_model(name, 2, dtype)
    path = tmp_path / "small.safetensors"
    prunus.save(small, path)
    for dense in (fresh(name), fresh(name).to(dtype)):
        loaded = prunus.load(dense, path)
        alike(small, loaded)
        x = inputs_of(name, dtype)
        assert max_rel_diff(outputs(small, x), outputs(loaded, x)) == 0
        assert outputs(loaded, x)[0].dtype == dtype


def test_a_model_that_went_to_half_precision_after_the_surgery_is_saved_as_it_stands(tmp_path: Path) -> None:
    _, small = small_model("residual")
    small.half()
    prunus.save(small, tmp_path / "small.safetensors")
    loaded = prunus.load(fresh("residual"), tmp_path / "small.safetensors")
    alike(small, loaded)


def test_weights_trained_on_after_the_surgery_are_saved(tmp_path: Path) -> None:
    _, small = small_model("residual", 1)
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    small.train()(*images()()).square().sum().backward()
    optimizer.step()
    prunus.save(small, str(tmp_path / "small.safetensors"))
    loaded = prunus.load(fresh("residual"), str(tmp_path / "small.safetensors"))
    alike(small, loaded)
    assert loaded.get_buffer("bn0.num_batches_tracked") == 1
    loaded(*images()()).sum().backward()
    assert all(p.grad is not None for p in loaded.parameters())


def test_tied_weights_stay_tied_and_are_stored_once(tmp_path: Path) -> None:
    _, small = small_model("tied")
    prunus.save(small, tmp_path / "small.safetensors")
    assert "b.weight" not in load_file(tmp_path / "small.safetensors")
    loaded = prunus.load(fresh("tied"), tmp_path / "small.safetensors")
    a, b = loaded.get_submodule("a"), loaded.get_submodule("b")
    assert a.weight is b.weight
    assert len(list(loaded.parameters())) == len(list(small.parameters()))


class Passing(nn.Module):
    """Buffers along the units: one is saved and one is made anew by every model."""

    def __init__(self, passing: float = 1.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("passing", passing * torch.arange(1.0, 9.0), persistent=False)
        self.register_buffer("kept", torch.arange(2.0, 10.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) * self.passing + self.kept).sigmoid())


def test_buffers_that_are_not_saved_are_cut_from_the_fresh_model(tmp_path: Path) -> None:
    x = torch.randn(4, 6)
    gated = prunus.gate(Passing(), x, units="groups")
    with torch.no_grad():
        gated.log_alpha.copy_(torch.tensor([3.0, -4, 3, -4, -4, 3, 3, -4]))
    small, _ = prunus.shrink(gated, x, batches=())
    prunus.save(small, tmp_path / "small.safetensors")
    assert set(load_file(tmp_path / "small.safetensors")) == {"a.weight", "a.bias", "b.weight", "b.bias", "kept"}
    loaded = prunus.load(Passing(), tmp_path / "small.safetensors")
    assert torch.equal(loaded(x), small(x))
    assert prunus.load(Passing(2.0), tmp_path / "small.safetensors").passing.tolist() == [2, 6, 12, 14]


def test_selected_inputs_are_selected_again(tmp_path: Path) -> None:
    _, small = small_model("lenet", 4)
    prunus.save(small, tmp_path / "small.safetensors")
    loaded = prunus.load(fresh("lenet"), tmp_path / "small.safetensors")
    one, two = small.get_submodule("fc1"), loaded.get_submodule("fc1")
    assert isinstance(one, SelectedLinear)
    assert isinstance(two, SelectedLinear)
    assert torch.equal(one.selected, two.selected)


def test_single_weights_are_stored_as_values_and_bits(tmp_path: Path) -> None:
    """Unpacked by a plain loop over bits, the first place in the lowest."""
    gated, small = small_model("mlp weights", 6)
    prunus.save(small, tmp_path / "small.safetensors")
    tensors = load_file(tmp_path / "small.safetensors")
    for name, layout in gated.graph.scattered.items():
        dense = small.get_parameter(name).detach().flatten().tolist()
        values, places = tensors[name].tolist(), tensors[f"{name}:places"].tolist()
        assert len(places) == math.ceil(len(dense) / 8)
        open_ = [k for k in range(len(dense)) if places[k // 8] >> k % 8 & 1]
        assert open_ == gated.keep().kept()[str(layout.groups[0])]
        assert [dense[k] for k in open_] == values
        assert sum(value != 0 for value in dense) == len(values)
    assert all(group["kept"] == [] for group in plan_in(tmp_path / "small.safetensors")["groups"].values())


def test_the_mode_is_that_of_the_fresh_model(tmp_path: Path) -> None:
    _, small = small_model("residual")
    prunus.save(small.eval(), tmp_path / "small.safetensors")
    assert prunus.load(fresh("residual").train(), tmp_path / "small.safetensors").training
    assert not prunus.load(fresh("residual").eval(), tmp_path / "small.safetensors").training


# ---- what cannot be saved --------------------------------------------------------------------------------------------


def test_only_what_shrink_returned_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"prunus\.save saves what prunus\.shrink returned; this model has no plan\."):
        prunus.save(residual(), tmp_path / "small.safetensors")
    assert listing(tmp_path) == []


def test_a_state_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    class Remembering(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    net = Net(lambda m, x: m.b(F.relu(m.a(x))), a=Remembering(6, 8), b=nn.Linear(8, 2))
    small, _ = prunus.shrink(prunus.gate(net, *vectors()()), *vectors()(), batches=())
    with pytest.raises(ModelError, match=r"keeps 'a\._extra_state' in its state dict, which is no tensor"):
        prunus.save(small, tmp_path / "small.safetensors")
    assert listing(tmp_path) == []


def half_written(tensors: Any, filename: Any, metadata: Any = None, error: BaseException | None = None) -> None:
    Path(filename).write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert error is not None
    raise error


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")],
    ids=["system", "safetensors"],
)
@pytest.mark.parametrize("old", [True, False])
def test_nothing_half_written_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, old: bool
) -> None:
    _, small = small_model("mlp")
    path = tmp_path / "small.safetensors"
    if old:
        prunus.save(small, path)
    before = path.read_bytes() if old else None
    monkeypatch.setattr(sealed, "save_file", lambda *a, **k: half_written(*a, **k, error=error))
    with pytest.raises(OutputError, match=r"small\.safetensors cannot be written: .*No space left on device"):
        prunus.save(small, path)
    assert listing(tmp_path) == (["small.safetensors"] if old else [])
    assert not old or path.read_bytes() == before


def test_the_users_umask_says_who_may_read_it(tmp_path: Path) -> None:
    _, small = small_model("mlp")
    before = os.umask(0o027)
    try:
        prunus.save(small, tmp_path / "small.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "small.safetensors").stat().st_mode & 0o777 == 0o640


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    _, small = small_model("mlp")
    (tmp_path / "taken").write_text("mine")
    for path in (tmp_path / "taken" / "small.safetensors", tmp_path):
        with pytest.raises(OutputError, match="cannot be written: "):
            prunus.save(small, path)
    assert listing(tmp_path) == ["taken"]
    assert (tmp_path / "taken").read_text() == "mine"


# ---- what is no file of ours -----------------------------------------------------------------------------------------


def refused(model: nn.Module, path: Path) -> str:
    """Loading is refused with an ArtefactError in one plain sentence, and with nothing else."""
    with pytest.raises(ArtefactError) as caught:
        prunus.load(model, path)
    said = str(caught.value)
    assert said.endswith(".")
    assert "\n" not in said
    assert "Traceback" not in said
    assert len(said) < 1000 + len(str(path))
    return said


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A file of a model of the zoo, to be damaged in copies."""
    folder = tmp_path_factory.mktemp("saved")

    def make(name: str) -> Path:
        path = folder / f"{name.replace(' ', '_')}.safetensors"
        if not path.exists():
            prunus.save(small_model(name, 3)[1], path)
        return path

    return make


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "small.safetensors", tmp_path, tmp_path / ("x" * 300)):
        assert refused(mlp(), path) == f"There is no file {path}."


def test_a_file_cut_anywhere(saved: Callable[[str], Path], tmp_path: Path) -> None:
    raw, path, model = saved("mlp").read_bytes(), tmp_path / "cut.safetensors", mlp()
    for size in {*range(0, 20), *range(20, len(raw), 37), *range(len(raw) - 20, len(raw))}:
        path.write_bytes(raw[:size])
        assert "is damaged or no safetensors file (" in refused(model, path)
    path.write_bytes(raw + b"\0")
    refused(model, path)


@pytest.mark.parametrize("name", ["mlp", "tied", *WEIGHTS])
def test_a_byte_that_flipped_is_noticed_wherever_it_stands(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Every third byte of the header and some of the weights: refused, or what is loaded is the same model."""
    raw, path, model = saved(name).read_bytes(), tmp_path / "flipped.safetensors", fresh(name)
    x = inputs_of(name)
    wanted = outputs(prunus.load(model, saved(name)), x)
    draw = random.Random(name)
    (length,) = struct.unpack("<Q", raw[:8])
    places = [*range(draw.randrange(3), 8 + length, 3), *(draw.randrange(8 + length, len(raw)) for _ in range(80))]
    let_in = 0
    for place in places:
        damaged = bytearray(raw)
        damaged[place] ^= 1 << draw.choice((0, 0, 1, 2, 5, 7))  # the low bits turn one digit into another
        path.write_bytes(damaged)
        try:
            loaded = prunus.load(model, path)
        except ArtefactError:
            continue
        let_in += 1
        found = outputs(loaded, x)
        assert max_rel_diff(wanted, found) == 0, f"byte {place}: {raw[place - 20 : place + 20]!r}"
    assert let_in < len(places) / 20


def test_a_plan_that_was_changed_by_hand_is_noticed(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Another input feature is read by the same weights: right in every size, and another function."""
    raw, path = saved("mlp").read_bytes(), tmp_path / "changed.safetensors"
    kept = plan_in(saved("mlp"))["groups"]["1.inputs"]["kept"]
    other = [*kept]
    other[0] = next(k for k in range(16) if k not in kept and len(str(k)) == len(str(kept[0])))
    written, changed = (json.dumps(k, separators=(",", ":")).encode() for k in (kept, other))
    assert raw.count(b":" + written) == 1
    path.write_bytes(raw.replace(b":" + written, b":" + changed))
    assert "is damaged" in refused(mlp(), path)


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_header_that_claims_any_length(size: int, saved: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "long.safetensors"
    path.write_bytes(struct.pack("<Q", size) + saved("mlp").read_bytes()[8:])
    refused(mlp(), path)


def with_header(path: Path, header: bytes, data: bytes = b"\0" * 64) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"hello",
    "not UTF-8": b'{"\xff\xfe": 1}',
    "a list": b"[]",
    "a number": b"7",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "empty": b"{}",
    "metadata of numbers": b'{"__metadata__": {"prunus": 3}}',
    "metadata in a list": b'{"__metadata__": []}',
    "huge": b'{"x": {"dtype": "F32", "shape": [549755813888], "data_offsets": [0, 64]}}',
    "overflowing": b'{"x": {"dtype": "F32", "shape": [4294967296, 4294967296, 9], "data_offsets": [0, 64]}}',
    "negative": b'{"x": {"dtype": "F32", "shape": [-16], "data_offsets": [0, 64]}}',
    "backwards": b'{"x": {"dtype": "F32", "shape": [16], "data_offsets": [64, 0]}}',
    "outside": b'{"x": {"dtype": "F32", "shape": [16], "data_offsets": [64, 128]}}',
    "overlapping": b'{"x": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]},'
    b' "y": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}',
    "of no type": b'{"x": {"dtype": "F33", "shape": [16], "data_offsets": [0, 64]}}',
    "a key twice": b'{"x": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]},'
    b' "x": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}',
    "empty tensor": b'{"x": {"dtype": "F32", "shape": [0, 549755813888], "data_offsets": [0, 0]}}',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_hostile_header(header: bytes, tmp_path: Path) -> None:
    refused(mlp(), with_header(tmp_path / "hostile.safetensors", header))


class Boom:
    """What a pickle can do to whoever reads it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def test_a_pickle_under_our_name_is_never_executed(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    path.write_bytes(pickle.dumps(Boom(str(tmp_path / "boom"))))
    assert "is damaged or no safetensors file (" in refused(mlp(), path)
    torch.save({"state": Boom(str(tmp_path / "boom"))}, path)
    refused(mlp(), path)
    assert listing(tmp_path) == ["small.safetensors"]


def test_safetensors_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    for metadata in (None, {}, {"format": "pt"}, {"digest": "0" * 64}):
        save_file(mlp().state_dict(), path, metadata=metadata)
        assert refused(mlp(), path).endswith("is a safetensors file, but not one of Prunus: it has no plan.")
    save_file(mlp().state_dict(), path, metadata={"prunus": "{}"})
    assert "of another version" in refused(mlp(), path)


@pytest.mark.parametrize("own, other", list(itertools.permutations(["mlp", "lenet", "tied", "mlp weights"], 2)))
def test_another_models_file(own: str, other: str, saved: Callable[[str], Path]) -> None:
    if {own, other} == {"mlp", "mlp weights"}:
        alike(prunus.load(fresh(own), saved(other)), small_model(other, 3)[1])  # the same model, gated otherwise
        return
    assert "belongs to another model: " in refused(fresh(own), saved(other))


def test_a_model_of_other_sizes_or_with_more_or_less_in_it(saved: Callable[[str], Path]) -> None:
    wider = Net(lambda m, x: x, conv1=nn.Conv2d(1, 6, 5), conv2=nn.Conv2d(6, 8, 5), fc1=nn.Linear(8 * 16, 9))
    said = refused(wider, saved("lenet"))
    assert "'conv2.weight' has shape (8, 6, 5, 5) here and (7, 6, 5, 5) there." in said
    more = lenet()
    more.extra = nn.Linear(2, 2)  # type: ignore[assignment]
    assert "it knows nothing of the tensor 'extra.weight'." in refused(more, saved("lenet"))
    less = lenet()
    less.fc2 = nn.Linear(9, 4, bias=False)  # type: ignore[assignment]
    assert "this one has no tensor 'fc2.bias'." in refused(less, saved("lenet"))
    untied = fresh("tied")
    untied.b.weight = nn.Parameter(torch.randn(8, 8))  # type: ignore[union-attr]
    assert "belongs to another model" in refused(untied, saved("tied"))


# ---- a plan that lies, under a right digest --------------------------------------------------------------------------


def forge(path: Path, small: nn.Module, plan: Any, tensors: dict[str, Tensor] | None = None) -> Path:
    """Write a file as `save` does, its digest right, with another plan (JSON text or what becomes it) or tensors."""
    seal = sealed.sealed
    facts = {key: value for key, value in plan.items() if key != "digest"} if isinstance(plan, dict) else {}
    source = SimpleNamespace(prunus_plan=small.prunus_plan, state_dict=lambda: tensors or small.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed, "sealed", lambda tensors, _: plan if isinstance(plan, str) else seal(tensors, facts))
        patch.setattr(os, "fsync", lambda _: None)
        prunus.save(source, path)  # type: ignore[arg-type]
    return path


def test_a_forged_file_with_the_true_plan_is_a_true_file(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """So that what the following tests see refused is refused for the lie."""
    for name in ("mlp", "tied", "grouped", *WEIGHTS):
        _, small = small_model(name, 3)
        alike(prunus.load(fresh(name), forge(tmp_path / "a.safetensors", small, plan_in(saved(name)))), small)


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "3", '"x"', "{}", "NaN", "[" * 100_000, "9" * 5000])
def test_a_plan_that_is_no_plan(text: str, tmp_path: Path) -> None:
    said = refused(mlp(), forge(tmp_path / "a.safetensors", small_model("mlp", 3)[1], text))
    assert "plan" in said


@pytest.mark.parametrize("schema", [0, 2, "1", None, [1], {}, 1.5])
def test_a_plan_of_another_schema(schema: Any, saved: Callable[[str], Path], tmp_path: Path) -> None:
    plan = plan_in(saved("mlp")) | {"schema": schema}
    said = refused(mlp(), forge(tmp_path / "a.safetensors", small_model("mlp", 3)[1], plan))
    assert said.endswith("has a plan of another version (this Prunus reads schema 1).")


def paths_into(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield prefix
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_into(inner, (*prefix, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = put(value[path[0]], path[1:], new)
    return changed


def drop(value: Any, path: tuple[Any, ...]) -> Any:
    changed = copy.copy(value)
    if len(path) == 1:
        del changed[path[0]]
    else:
        changed[path[0]] = drop(value[path[0]], path[1:])
    return changed


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


NEW: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**39, 2**40, 2**63, 10**400, 1.5, 1e308, "", "x", "1", "1.weight", "leaf",
    [], {}, [[]], [0], [0, 0], ["leaf", None, 8], ["leaf", None, 2**39], ["leaf", "1", 2**39], ["prod"], ["cat"],
    ["cat", *[["leaf", None, 1]] * 8], ["both", ["leaf", None, 8], ["leaf", "1", 8]], {"x": {}},
    {"size": 8, "kept": [0]},
]  # fmt: skip


class Watch(TorchDispatchMode):
    """Remember the largest tensor that anything makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, int)]
        self.largest = max([self.largest, *sizes])
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


@pytest.mark.parametrize("name", ["mlp", "tied", "grouped", *WEIGHTS, "two flattened branches"])
def test_a_plan_changed_anywhere_is_refused_or_means_the_same(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Leaves, subtrees and whole entries exchanged, dropped and moved about.

    What may mean something else without being refused is which input features are selected: whoever writes a digest of
    their own can write any network of that shape.
    """
    plan, small = plan_in(saved(name)), small_model(name, 3)[1]
    model, x, draw = fresh(name), inputs_of(name), random.Random(name)
    wanted = outputs(small, x)
    every = [path for path in paths_into(plan) if path]
    listed = [path for path in every if "kept" in path or path[0] == "dense"]
    every = [path for path in every if path not in listed] * 3 + draw.sample(listed, min(40, len(listed)))
    found = {"refused": 0, "same": 0}
    for path in draw.sample(every, min(220, len(every))):
        kind = draw.choice(["new", "new", "new", "drop", "swap"])
        if kind == "new":
            lie = put(plan, path, draw.choice(NEW))
        elif kind == "drop":
            lie = drop(plan, path)
        else:
            other = draw.choice(every)
            lie = put(plan, path, at(plan, other))
        if lie == plan:
            continue
        file = forge(tmp_path / "a.safetensors", small, lie)
        with Watch() as watch:
            try:
                loaded = prunus.load(model, file)
            except ArtefactError:
                found["refused"] += 1
                continue
            finally:
                assert watch.largest < 20_000, (path, lie)
        selected = set(plan["selections"].values())
        if path[0] == "groups" and len(path) > 1 and path[1] in selected and path[2:3] == ("kept",):
            outputs(loaded, x)
            continue
        assert max_rel_diff(wanted, outputs(loaded, x)) == 0, (path, kind, at(lie, path) if kind != "drop" else None)
        found["same"] += 1
    assert found["refused"] > 50


@pytest.mark.parametrize("name", ["mlp", "grouped", *WEIGHTS, "two flattened branches"])
@pytest.mark.parametrize("size", [2**31, 2**39, 2**40 - 1, 2**63, 10**300], ids=str)
def test_a_size_that_is_claimed_is_never_allocated(
    name: str, size: int, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    plan, small = plan_in(saved(name)), small_model(name, 3)[1]
    numbers = [p for p in paths_into(plan) if type(at(plan, p)) is int and p[0] in ("groups", "axes", "split", "dense")]
    random.Random(size).shuffle(numbers)
    lies = [put(plan, path, size) for path in numbers[:25]]
    for group in plan["groups"]:  # everything that speaks of a group, in accord
        lie = put(plan, ("groups", group, "size"), size)
        for path in numbers:
            if path[-1] == 2 and at(plan, path[:-1])[:2] == ["leaf", group]:
                lie = put(lie, path, size)
        lies.append(lie)
    for lie in lies:
        file = forge(tmp_path / "a.safetensors", small, lie)
        with Watch() as watch:
            refused(fresh(name), file)
        assert watch.largest < 20_000


@pytest.mark.parametrize(
    "kept, said",
    [
        ([], "must list the units of '3' that stay, one at least"),
        (None, "must list the units of '3' that stay"),
        ({}, "must list the units of '3' that stay"),
        ("01", "must list the units of '3' that stay"),
        ([10], r"keeps units of '3' outside 0\.\.9"),
        ([-1], r"keeps units of '3' outside 0\.\.9"),
        ([2**39], r"keeps units of '3' outside 0\.\.9"),
        ([True], r"keeps units of '3' outside 0\.\.9"),
        ([0.0], r"keeps units of '3' outside 0\.\.9"),
        (["0"], r"keeps units of '3' outside 0\.\.9"),
        ([[0]], "that Prunus did not write"),
        ([0, 0], "must list the units of '3' that stay, each once"),
        ([0, False], "must list the units of '3' that stay, each once"),
        (list(range(10)), "has shape"),
    ],
)
def test_indices_that_are_none(kept: Any, said: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    plan = put(plan_in(saved("mlp")), ("groups", "3", "kept"), kept)
    with pytest.raises(ArtefactError, match=said):
        prunus.load(mlp(), forge(tmp_path / "a.safetensors", small_model("mlp", 3)[1], plan))


def test_terms_may_be_deep_only_as_far_as_models_are(saved: Callable[[str], Path], tmp_path: Path) -> None:
    plan, small = plan_in(saved("mlp")), small_model("mlp", 3)[1]
    term = plan["axes"]["3.weight"][1]
    assert term == ["leaf", "1", 12]
    path = tmp_path / "a.safetensors"
    for depth, fits in ((1, True), (30, True), (33, False), (500, False)):
        deep = term
        for _ in range(depth):
            deep = ["prod", deep]
        forge(path, small, put(plan, ("axes", "3.weight", 1), deep))
        if fits:
            alike(prunus.load(mlp(), path), small)
        else:
            assert "an axis that is not written as Prunus writes axes" in refused(mlp(), path)
    fine = plan["axes"]["1.weight"][1]
    assert fine == ["both", ["leaf", None, 16], ["leaf", "1.inputs", 16]]
    for tensor, lie in (
        ("3.weight", ["both", term, term]),  # a group over itself is that group, but nothing of ours lays it so
        ("3.weight", ["prod", ["both", ["leaf", None, 12], term]]),
        ("1.weight", ["both", fine, fine[2]]),
        ("1.weight", ["both", ["prod", fine], fine[2]]),
    ):
        forge(path, small, put(plan, ("axes", tensor, 1), lie))
        assert f"gates {tensor!r} finer than its producers" in refused(mlp(), path)


def test_a_selection_is_there_where_features_are_gone_and_nowhere_else(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    plan, small = plan_in(saved("mlp")), small_model("mlp", 3)[1]
    path = tmp_path / "a.safetensors"
    assert plan["selections"] == {"1": "1.inputs"}
    refused(mlp(), forge(path, small, plan | {"selections": {"1": "1.inputs", "3": "1"}}))
    refused(mlp(), forge(path, small, plan | {"selections": {"3": "1"}}))
    refused(mlp(), forge(path, small, plan | {"selections": {}}))


# ---- tensors that lie ------------------------------------------------------------------------------------------------


def test_weights_that_were_changed_are_noticed(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Written anew by safetensors itself, under the old metadata."""
    path = tmp_path / "a.safetensors"
    metadata = metadata_in(saved("mlp"))
    for name in load_file(saved("mlp")):
        tensors = load_file(saved("mlp"))
        tensors[name].view(-1)[0] += 1e-3
        save_file(tensors, path, metadata)
        assert "is damaged: its weights " in refused(mlp(), path)
        tensors = load_file(saved("mlp"))
        del tensors[name]
        save_file(tensors, path, metadata)
        assert "is damaged: its weights " in refused(mlp(), path)
    tensors = load_file(saved("mlp"))
    bare = {key: value for key, value in json.loads(metadata["prunus"]).items() if key != "digest"}
    save_file(tensors, path, {"prunus": json.dumps(bare)})
    assert "is damaged: its plan has no digest" in refused(mlp(), path)
    save_file(tensors, path, metadata)
    alike(prunus.load(mlp(), path), small_model("mlp", 3)[1])


def test_weights_that_do_not_fit_the_plan(saved: Callable[[str], Path], tmp_path: Path) -> None:
    plan, small, path = plan_in(saved("residual")), small_model("residual", 3)[1], tmp_path / "a.safetensors"
    state = small.state_dict()
    count = "bn0.num_batches_tracked"
    wrong: dict[str, tuple[dict[str, Tensor], str]] = {
        "integers for numbers": (state | {"head.weight": state["head.weight"].to(torch.int32)}, "holds torch.int32"),
        "numbers for integers": (state | {count: state[count].float()}, "holds torch.float32"),
        "other integers": (state | {count: state[count].to(torch.int32)}, "holds torch.int32, where torch.int64"),
        "pairs": (
            state | {"head.bias": torch.complex(state["head.bias"], state["head.bias"])},
            "holds torch.complex64",
        ),
        "truth values": (state | {"head.bias": state["head.bias"] > 0}, "holds torch.bool"),
        "another shape": (state | {"head.weight": state["head.weight"].repeat(2, 1)}, "its plan says"),
        "a dimension more": (state | {"head.bias": state["head.bias"][None]}, "its plan says"),
        "one tensor more": (state | {"extra": torch.zeros(2)}, "'extra' is in the model or in the file, not in both"),
        "one tensor less": (
            {k: v for k, v in state.items() if k != "bn1.bias"},
            "'bn1.bias' is in the model or in the file",
        ),
    }
    for what, (tensors, said) in wrong.items():
        forge(path, small, plan, tensors)
        assert said in refused(residual(), path), what
    other = {k: v.to(torch.float64) if v.is_floating_point() else v for k, v in state.items()}
    assert prunus.load(residual(), forge(path, small, plan, other)).get_parameter("head.bias").dtype == torch.float64


@pytest.mark.parametrize("name", WEIGHTS)
def test_places_that_do_not_fit_their_values(name: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    plan, small = plan_in(saved(name)), small_model(name, 3)[1]
    good = load_file(saved(name))
    name = "3.weight"
    places = good[f"{name}:places"]
    wrong = {
        "shorter": good | {f"{name}:places": places[:-1].clone()},
        "longer": good | {f"{name}:places": torch.cat([places, places[:1]])},
        "of another type": good | {f"{name}:places": places.to(torch.int32)},
        "nowhere": good | {f"{name}:places": torch.zeros_like(places)},
        "everywhere": good | {f"{name}:places": torch.full_like(places, 255)},
        "gone": {k: v for k, v in good.items() if k != f"{name}:places"},
        "without values": {k: v for k, v in good.items() if k != name},
        "one value less": good | {name: good[name][:-1].clone()},
        "values in a table": good | {name: good[name][None]},
    }
    honest = SimpleNamespace(prunus_plan={**small.prunus_plan, "scattered": {}})  # nothing is packed on the way
    for what, tensors in wrong.items():
        path = forge(tmp_path / "a.safetensors", honest, plan, tensors)  # type: ignore[arg-type]
        assert refused(mlp(), path), what
    path = forge(tmp_path / "a.safetensors", honest, plan, good)  # type: ignore[arg-type]
    alike(prunus.load(mlp(), path), small)


def test_blocks_are_stored_as_values_and_bits(tmp_path: Path) -> None:
    """Unpacked by plain loops: which block a weight lies in, and the bit of that block."""
    gated, small = small_model("mlp blocks", 6)
    prunus.save(small, tmp_path / "small.safetensors")
    tensors, kept = load_file(tmp_path / "small.safetensors"), gated.keep().kept()
    assert list(gated.graph.sizes)[:3] == ["1.weight", "1.weight#right", "1.weight#bottom"]
    stored = 0
    for name in ("1.weight", "3.weight", "5.weight"):
        weight, parts, bits = small.get_parameter(name).detach(), {}, []
        rows, columns = weight.shape
        counts = {"": rows // 5 * (columns // 3), "#right": rows // 5 * (columns % 3 > 0)}
        counts["#bottom"] = (rows % 5 > 0) * (columns // 3)
        for part, count in counts.items():
            parts[part] = count if name + part in gated.graph.sizes else 0
            bits += [(part, k) for k in range(parts[part])]
        places = tensors[f"{name}:places"].tolist()
        open_ = {one for k, one in enumerate(bits) if places[k // 8] >> k % 8 & 1}
        assert open_ == {(p, k) for p in parts if parts[p] for k in kept[name + p]}
        values = tensors[name].tolist()
        for i, j in itertools.product(range(rows), range(columns)):
            right, low = j >= columns // 3 * 3, i >= rows // 5 * 5
            part = "#corner" if right and low else "#right" if right else "#bottom" if low else ""
            number = j // 3 if low else i // 5 if right else i // 5 * (columns // 3) + j // 3
            if not parts.get(part) or (part, number) in open_:
                assert weight[i, j] == values.pop(0)
            else:
                assert weight[i, j] == 0
        assert not values
        stored += 4 * tensors[name].numel() + len(places)
    assert gated.deployed()["bytes"] == stored + 4 * (12 + 10 + 4)


@pytest.mark.parametrize(
    "change",
    [
        {"block": [0, 3]}, {"block": [5]}, {"block": [5, 3.0]}, {"block": [True, 3]}, {"block": None},
        {"block": [2**50, 1]}, {"block": [2**30, 1]}, {"block": [12, 16]}, {"block": [4, 4]}, {"most": [2, 4]},
        {"most": "2:4"}, {"groups": []}, {"groups": [None] * 4}, {"groups": ["1.weight"]}, {"groups": ["1.weight"] * 4},
        {"groups": ["1.weight", 1, 1, 1]}, {"groups": ["3.weight", "3.weight#right", None, None]},
        {"groups": ["1.weight", None, None, None]}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_blocks_that_lie_are_refused(change: Any, saved: Callable[[str], Path], tmp_path: Path) -> None:
    plan, small = plan_in(saved("mlp blocks")), small_model("mlp blocks", 3)[1]
    honest = SimpleNamespace(prunus_plan={**small.prunus_plan, "scattered": {}})
    lie = put(plan, ("scattered", "1.weight"), plan["scattered"]["1.weight"] | change)
    path = forge(tmp_path / "a.safetensors", honest, lie, load_file(saved("mlp blocks")))  # type: ignore[arg-type]
    with Watch() as watch:
        refused(mlp(), path)
    assert watch.largest < 20_000


@pytest.mark.parametrize(
    "most", [[2, 3], [1, 4], [4, 4], [0, 4], [2, 5], [5, 4], [-1, 4], [2, 2**39], [2.0, 4]], ids=str
)
def test_a_file_that_keeps_more_than_its_pattern_says_is_refused(
    most: Any, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    plan, small = plan_in(saved("mlp 2:4")), small_model("mlp 2:4", 3)[1]
    honest = SimpleNamespace(prunus_plan={**small.prunus_plan, "scattered": {}})
    lie = put(plan, ("scattered", "1.weight", "most"), most)
    path = forge(tmp_path / "a.safetensors", honest, lie, load_file(saved("mlp 2:4")))  # type: ignore[arg-type]
    refused(mlp(), path)
