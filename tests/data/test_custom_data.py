"""A user's own data, named as "package.module:function" and found in the current folder."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from prunus.data import Dataset, custom, load
from prunus.errors import DataError

HEAD = """
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

X = torch.arange(32.0, dtype=torch.float64).view(8, 4)
Y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Write a module in an otherwise empty current folder and give the name of its function `loaders`."""
    monkeypatch.chdir(tmp_path)
    numbers = itertools.count()
    before = set(sys.modules)

    def write(body: str, head: str = HEAD) -> str:
        module = f"own_{tmp_path.name}_{next(numbers)}"
        (tmp_path / f"{module}.py").write_text(head + body)
        return f"{module}:loaders"

    yield write
    for module in set(sys.modules) - before:
        if module.startswith("own_"):
            del sys.modules[module]


GOOD = {
    "tensors": "def loaders(): return X, Y, X[:3], Y[:3]",
    "arrays": "def loaders(): return [X.numpy(), Y.numpy(), X[:3].numpy(), Y[:3].numpy()]",
    "read-only arrays and lists": """
def loaders():
    x = X.numpy()
    x.flags.writeable = False
    return x, Y.tolist(), x[:3], [0, 1, 2]
""",
    "small integers as labels": "def loaders(): return X, Y.to(torch.uint8), X[:3], Y[:3].to(torch.int16)",
    "default arguments": "def loaders(path='here', *more, **others): return X, Y, X[:3], Y[:3]",
    "a method": """
class Source:
    @staticmethod
    def make(): return X, Y, X[:3], Y[:3]
loaders = Source.make
""",
    "loaders": """
def loaders():
    data = TensorDataset(X, Y)
    return DataLoader(data, batch_size=3), DataLoader(TensorDataset(X[:3], Y[:3]), batch_size=2)
""",
    "iterables of batches": """
def loaders():
    return [(X[:5], Y[:5]), (X[5:], Y[5:])], iter([[X[:3].numpy(), Y[:3].tolist()]])
""",
    "datasets": """
class Own(Dataset):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return X[i], int(Y[i])
def loaders(): return Own(8), TensorDataset(X[:3], Y[:3])
""",
    "iterable datasets": """
class Own(IterableDataset):
    def __init__(self, n): self.n = n
    def __iter__(self): return iter(zip(X[:self.n], Y[:self.n]))
def loaders(): return Own(8), Own(3)
""",
    "imports made late": """
def loaders():
    import late
    return late.four(X, Y)
""",
}


@pytest.mark.parametrize("kind", GOOD)
def test_all_the_ways_to_return_data_give_the_same(kind: str, own, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("def four(x, y): return x, y, x[:3], y[:3]\n")
    name = own(GOOD[kind])
    path = list(sys.path)
    data = load(name)
    sys.modules.pop("late", None)
    assert sys.path == path
    assert isinstance(data, Dataset)
    assert (data.name, data.classes) == (name, 3)
    assert data.train_x.dtype == data.test_x.dtype == torch.float32
    assert torch.equal(data.train_x, torch.arange(32.0).view(8, 4))
    assert torch.equal(data.test_x, data.train_x[:3])
    assert data.train_y.dtype == data.test_y.dtype == torch.int64
    assert data.train_y.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert data.test_y.tolist() == [0, 1, 2]


def test_token_ids_stay_whole_numbers_and_a_shape_is_given(own) -> None:
    data = load(own("def loaders(): return X.long(), Y, X[:3].long(), Y[:3]"), shape=(2, 2))
    assert data.train_x.dtype == torch.int64
    assert data.train_x.shape == (8, 2, 2)


BAD = {
    "returns nothing": ("def loaders(): pass", r"loaders\(\) returned None, where four tensors"),
    "returns three": ("def loaders(): return X, Y, X", r"returned a tuple of 3 \(Tensor, Tensor, Tensor\)"),
    "returns one set": ("def loaders(): return X, Y", r"returned a tuple of 2 \(Tensor, Tensor\)"),
    "returns words": ("def loaders(): return X, ['a'] * 8, X, Y", r"train_y of .*loaders\(\) is a list of 8"),
    "returns no loaders": ("def loaders(): return 1, 2", "the train part of .* is a int, where a DataLoader"),
    "raises": ("def loaders(): return 1 / 0", r"Calling .*loaders\(\) raised ZeroDivisionError: division by zero"),
    "leaves": ("import sys\ndef loaders(): sys.exit(3)", "raised SystemExit: 3"),
    "wants arguments": ("def loaders(path): pass", r"callable without arguments, .*\(path\)"),
    "is no function": ("loaders = 3", "names a int, where a function"),
    "is not there": ("def loader(): pass", "has no loaders, .*nearest: loader"),
    "does not compile": ("def loaders(: pass", "raised SyntaxError"),
    "fails at import": ("raise OSError('no such disk')", "raised OSError: no such disk"),
    "needs another": ("import not_installed_anywhere", "it needs not_installed_anywhere, which is not installed"),
    "empty loader": ("def loaders(): return [], []", r"the train part of .* is empty"),
    "empty test loader": ("def loaders(): return [(X, Y)], []", r"the test part of .* is empty"),
    "batches of three": ("def loaders(): return [(X, Y, Y)], [(X, Y)]", "batch 0 came as a tuple of 3"),
    "batches without labels": ("def loaders(): return DataLoader(X), DataLoader(X)", "batch 0 came as a Tensor"),
    "samples without labels": (
        "def loaders(): return TensorDataset(X), TensorDataset(X)",
        r"the samples came as a list of 1 \(Tensor\)",
    ),
    "batches that disagree": ("def loaders(): return [(X, Y[:7])], []", r"x of shape \(8, 4\) and y of shape \(7,\)"),
    "ragged batches": ("def loaders(): return [(X, Y), (X[:, :3], Y)], []", "Reading the train part .* RuntimeError"),
    "no length": (
        "class Own(Dataset):\n    def __getitem__(self, i): return X[i], Y[i]\ndef loaders(): return Own(), Own()",
        "is a Dataset without a length",
    ),
    "a dataset that fails": (
        "class Own(Dataset):\n    def __len__(self): return 3\n"
        "    def __getitem__(self, i): raise OSError('no file 7.png')\ndef loaders(): return Own(), Own()",
        "Reading the train part .* raised OSError: no file 7.png",
    ),
    "PIL images": (
        "from PIL import Image\nclass Own(Dataset):\n    def __len__(self): return 3\n"
        "    def __getitem__(self, i): return Image.new('L', (2, 2)), 0\ndef loaders(): return Own(), Own()",
        "ToTensor",
    ),
    "regression": ("def loaders(): return X, Y.float(), X, Y.float()", "train_y holds float32, .*classification only"),
    "bytes": ("def loaders(): return X.byte(), Y, X.byte(), Y", r"train_x holds uint8, .*x / 255"),
    "NaN": ("def loaders(): return X.log() * 0, Y, X, Y", r"train_x holds 1 values of 32 .* index \(0, 0\)"),
    "one class": ("def loaders(): return X, Y * 0, X, Y * 0", "one class only"),
    "an unseen class": ("def loaders(): return X, Y, X, Y + 1", "test_y has the label 3 at index 2"),
    "one-hot": ("def loaders(): return X, torch.eye(8).long(), X, torch.eye(8).long()", "argmax"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_used_is_refused_by_name(kind: str, own) -> None:
    body, message = BAD[kind]
    name = own(body)
    with pytest.raises(DataError, match=message) as caught:
        load(name)
    assert name.split(":")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_data_error_of_the_users_own_is_passed_on(own) -> None:
    with pytest.raises(DataError, match=r"^fetch it first$"):
        load(own("from prunus.errors import DataError\ndef loaders(): raise DataError('fetch it first')"))


@pytest.mark.parametrize("name", ["mod:", ":loaders", ":", "my mod:f", "a..b:f", "mod:f()", "a/b.py:f"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=r'names no function; write "package\.module:function"'):
        load(name)


def test_a_module_that_is_not_there_is_named_with_the_folder(own, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"no module nowhere, asked for by 'nowhere\.at_all:f'.*{tmp_path}"):
        load("nowhere.at_all:f")


def test_an_endless_loader_is_stopped(own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "MOST_BYTES", 4096)
    with pytest.raises(DataError, match=r"the train part of .* without ending"):
        load(own("import itertools\ndef loaders(): return itertools.cycle([(X, Y)]), []"))


def test_what_is_loaded_is_a_copy_without_gradients(own) -> None:
    data = load(own("def loaders(): return X.float().requires_grad_(), Y, X, Y"))
    assert not data.train_x.requires_grad
    assert isinstance(data.train_x.numpy(), np.ndarray)
