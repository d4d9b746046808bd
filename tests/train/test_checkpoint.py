"""Checkpoints: what comes back is what was written, or the sentence that it is not."""

import copy
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from train_toys import Net, toy_data

from prunus import sealed
from prunus.errors import ArtefactError, OutputError
from prunus.extrapolation import ExtrapolationFromThePast
from prunus.train import checkpoint

FACTS = {"epoch": 3, "names": ["net", "toy"], "history": [[2.0, 1.5], [1.25, 0.1]], "fixed": False, "landing": None}


def some() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(4, 3, generator=generator),
        "a.double": torch.randn(3, generator=generator, dtype=torch.float64),
        "a.half": torch.randn(5, generator=generator).bfloat16(),
        "count": torch.tensor(7),
        "flag": torch.tensor([True, False]),
        "random": torch.arange(9, dtype=torch.uint8),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
        "empty": torch.zeros(0, 4),
        "turned": torch.arange(6.0).view(2, 3).T,
    }


def bits(value: Tensor) -> bytes:
    return value.contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = some()
    checkpoint.write(tmp_path / "new" / "folder", written, FACTS)
    tensors, facts = checkpoint.read(tmp_path / "new" / "folder")
    assert tensors.keys() == written.keys()
    for name, value in written.items():
        assert tensors[name].dtype == value.dtype
        assert tensors[name].shape == value.shape
        assert bits(tensors[name]) == bits(value)
    assert {key: facts[key] for key in FACTS} == FACTS
    assert facts["schema"] == checkpoint.SCHEMA
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [checkpoint.NAME]


def test_the_same_is_written_in_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        checkpoint.write(tmp_path / name, some(), FACTS)
    one, other = ((tmp_path / name / checkpoint.NAME).read_bytes() for name in "ab")
    assert one == other


def half_written(tensors: Any, path: Path, metadata: Any) -> None:
    path.write_bytes(b"half of i")
    raise OSError(28, "No space left on device")


def interrupted(tensors: Any, path: Path, metadata: Any) -> None:
    path.write_bytes(b"half of i")
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "how, error", [(half_written, OutputError), (interrupted, KeyboardInterrupt)], ids=["full", "interrupted"]
)
def test_a_write_that_fails_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[..., None], error: type[BaseException]
) -> None:
    checkpoint.write(tmp_path, some(), FACTS)
    before = (tmp_path / checkpoint.NAME).read_bytes()
    monkeypatch.setattr(sealed, "save_file", how)
    with pytest.raises(error):
        checkpoint.write(tmp_path, {"a": torch.zeros(3)}, {"epoch": 4})
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.NAME]
    assert (tmp_path / checkpoint.NAME).read_bytes() == before
    assert checkpoint.read(tmp_path)[1]["epoch"] == 3


def test_a_renaming_that_fails_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.write(tmp_path, some(), FACTS)

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("prunus.files.os.replace", refuse)
    with pytest.raises(OutputError, match="cannot be written"):
        checkpoint.write(tmp_path, {"a": torch.zeros(3)}, {"epoch": 4})
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.NAME]
    assert checkpoint.read(tmp_path)[1]["epoch"] == 3


def test_a_disk_that_is_really_full_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    checkpoint.write(tmp_path, some(), FACTS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OutputError, match="cannot be written"):
            checkpoint.write(tmp_path, {"large": torch.randn(100_000)}, FACTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.NAME]
    assert checkpoint.read(tmp_path)[0].keys() == some().keys()


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"no checkpoint at .*state.safetensors.*--resume"):
        checkpoint.read(tmp_path / "nowhere")


def small(folder: Path) -> tuple[Path, bytes]:
    checkpoint.write(folder, {"a": torch.arange(3.0), "b": torch.arange(4, dtype=torch.uint8)}, FACTS)
    return folder / checkpoint.NAME, (folder / checkpoint.NAME).read_bytes()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path, whole = small(tmp_path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtefactError, match=r"damaged|version"):
            checkpoint.read(tmp_path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ArtefactError, match="damaged"):
        checkpoint.read(tmp_path)
    path.write_bytes(whole)
    checkpoint.read(tmp_path)


def unseen(folder: Path, path: Path, whole: bytes, places: range) -> list[tuple[int, int]]:
    """Flips of a bit that neither are refused nor leave everything as it was."""
    tensors, facts = checkpoint.read(folder)
    missed = []
    for place in places:
        for bit in {0, place % 7}:  # digits and letters become others, and most of what else there is
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                read, said = checkpoint.read(folder)
            except ArtefactError:
                continue
            same = read.keys() == tensors.keys() and all(torch.equal(read[k], v) for k, v in tensors.items())
            if not same or said != facts:
                missed.append((place, bit))
    return missed


def test_every_flipped_bit_of_the_tensors_is_refused(tmp_path: Path) -> None:
    path, whole = small(tmp_path)
    head = 8 + int.from_bytes(whole[:8], "little")
    assert not unseen(tmp_path, path, whole, range(head, len(whole)))


def test_every_flipped_bit_of_the_head_is_refused(tmp_path: Path) -> None:
    """The head holds the facts: an epoch, a step or a setting that reads otherwise is damage too."""
    path, whole = small(tmp_path)
    head = 8 + int.from_bytes(whole[:8], "little")
    assert not unseen(tmp_path, path, whole, range(head))


@pytest.mark.parametrize(
    "text, message",
    [
        (json.dumps({"schema": 2}), "another version"),
        ("[1, 2]", "another version"),
        ("7", "another version"),
        (json.dumps({"schema": 1}), "damaged"),
        (json.dumps({"schema": 1, "digest": "00"}), "not those that were saved"),
        ("{", "damaged"),
        ("[" * 100_000, "damaged"),
    ],
)
def test_a_strangers_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / checkpoint.NAME, metadata={"checkpoint": text})
    with pytest.raises(ArtefactError, match=message):
        checkpoint.read(tmp_path)
    save_file({"a": torch.zeros(3)}, tmp_path / checkpoint.NAME)
    with pytest.raises(ArtefactError, match="not one of Prunus"):
        checkpoint.read(tmp_path)


# ---- modules ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A shared weight, and a buffer that state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.other.weight = self.one.weight
        self.register_buffer("hidden", torch.randn(2), persistent=False)


def test_a_module_comes_back_with_all_its_buffers_and_shared_weights_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, fresh = Tied(), Tied()
    tensors = checkpoint.module_tensors("m", module)
    assert sorted(tensors) == ["m.hidden", "m.one.bias", "m.one.weight", "m.other.bias"]
    checkpoint.write(tmp_path, tensors, {})
    addresses = [p.data_ptr() for p in fresh.parameters()]
    checkpoint.restore_module("m", fresh, checkpoint.read(tmp_path)[0], "here")
    assert torch.equal(fresh.hidden, module.hidden)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), module.parameters(), strict=True))
    assert fresh.other.weight is fresh.one.weight
    assert [p.data_ptr() for p in fresh.parameters()] == addresses


def test_another_models_checkpoint_is_refused_by_the_name_of_a_tensor() -> None:
    tensors = checkpoint.module_tensors("m", nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)))
    with pytest.raises(ArtefactError, match=r"runs/x belongs to another model: for '1.weight' .*\(2, 5\).*\(3, 5\)"):
        checkpoint.restore_module("m", nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), tensors, "runs/x")
    with pytest.raises(ArtefactError, match=r"'2.weight' it holds nothing, this model \(2, 2\)"):
        checkpoint.restore_module(
            "m", nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(2, 2)), tensors, "runs/x"
        )
    with pytest.raises(ArtefactError, match=r"'0.weight' it holds nothing"):
        checkpoint.restore_module("n", nn.Sequential(nn.Linear(4, 5)), tensors, "runs/x")


# ---- optimizers ------------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda p: Adam(p, lr=0.01),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: SGD(p, lr=0.05),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam from the past": lambda p: ExtrapolationFromThePast(Adam(p, lr=0.01)),
    "momentum from the past": lambda p: ExtrapolationFromThePast(SGD(p, lr=0.05, momentum=0.9)),
}


def go_on(network: nn.Module, optimizer: Optimizer, steps: range) -> list[float]:
    data, losses = toy_data(), []
    network.eval()
    for step in steps:
        chosen = torch.arange(8) + 8 * step
        loss = nn.functional.cross_entropy(network(data.train_x[chosen]), data.train_y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_to_the_same_bits(tmp_path: Path, name: str) -> None:
    network = Net()
    optimizer = OPTIMIZERS[name](network.parameters())
    go_on(network, optimizer, range(5))
    kept = checkpoint.module_tensors("net", network) | checkpoint.optimizer_tensors("opt", optimizer)
    checkpoint.write(tmp_path, kept, {})
    copied, twin = copy.deepcopy((network, optimizer))
    losses = go_on(network, optimizer, range(5, 12))

    resumed = Net(seed=9)
    other = OPTIMIZERS[name](resumed.parameters())
    tensors, _ = checkpoint.read(tmp_path)
    checkpoint.restore_module("net", resumed, tensors, "here")
    checkpoint.restore_optimizer("opt", other, tensors)
    assert go_on(resumed, other, range(5, 12)) == losses == go_on(copied, twin, range(5, 12))
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), resumed.parameters(), strict=True))
    after = [checkpoint.optimizer_tensors("opt", each) for each in (optimizer, other)]
    assert after[0].keys() == after[1].keys()
    assert all(torch.equal(after[0][key], after[1][key]) for key in after[0])
    if name != "sgd":  # without its state it would have gone elsewhere: the state is what does it
        forgetful = Net(seed=9)
        checkpoint.restore_module("net", forgetful, tensors, "here")
        assert go_on(forgetful, OPTIMIZERS[name](forgetful.parameters()), range(5, 12)) != losses


def test_rates_are_not_restored_and_other_prefixes_are_left_alone() -> None:
    network = Net()
    optimizer = Adam(network.parameters(), lr=0.01)
    go_on(network, optimizer, range(2))
    tensors = checkpoint.optimizer_tensors("opt", optimizer) | {"opt2.0.exp_avg": torch.zeros(1)}
    other = Adam(network.parameters(), lr=0.5)
    checkpoint.restore_optimizer("opt", other, tensors)
    assert other.param_groups[0]["lr"] == 0.5
    assert checkpoint.optimizer_tensors("opt", other).keys() == tensors.keys() - {"opt2.0.exp_avg"}


def test_a_restored_optimizer_does_not_write_into_what_was_read() -> None:
    network = Net()
    optimizer = Adam(network.parameters(), lr=0.01)
    go_on(network, optimizer, range(2))
    tensors = {key: value.clone() for key, value in checkpoint.optimizer_tensors("opt", optimizer).items()}
    before = {key: value.clone() for key, value in tensors.items()}
    other = Adam(network.parameters(), lr=0.01)
    checkpoint.restore_optimizer("opt", other, tensors)
    go_on(network, other, range(2, 4))
    assert all(torch.equal(tensors[key], before[key]) for key in tensors)


# ---- random numbers --------------------------------------------------------------------------------------------------


def test_the_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        torch.rand(5)
        checkpoint.write(tmp_path, checkpoint.random_state(torch.device("cpu")), {})
        expected = torch.rand(7), torch.randn(7), torch.randperm(7)
        torch.manual_seed(99)
        torch.randn(3)
        checkpoint.restore_random(checkpoint.read(tmp_path)[0], torch.device("cpu"))
        found = torch.rand(7), torch.randn(7), torch.randperm(7)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
