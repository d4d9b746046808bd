import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from prunus.data import idx
from prunus.errors import DataError

DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.float32, np.float64]
SMALL = idx.dumps(np.arange(12, dtype=np.uint8).reshape(3, 4))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES).flatmap(lambda kind: npst.arrays(kind, npst.array_shapes(max_dims=4, min_side=0))))
def test_an_array_comes_back_as_it_went(array: np.ndarray) -> None:
    back = idx.parse(idx.dumps(array), shape=array.shape)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(SMALL) - 1))
def test_every_truncation_is_refused(length: int) -> None:
    with pytest.raises(DataError, match=r"the file is (cut short|empty)"):
        idx.parse(SMALL[:length], "the file")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_noise_is_parsed_or_refused_and_nothing_else(data: bytes) -> None:
    try:
        array = idx.parse(data)
    except DataError:
        return
    assert idx.dumps(array) == data


def test_plain_and_gzipped_files_are_read_alike(tmp_path: Path) -> None:
    for name, data in (("a.idx", SMALL), ("a.idx.gz", gzip.compress(SMALL))):
        (tmp_path / name).write_bytes(data)
        array = idx.read(tmp_path / name, shape=(3, 4), sha256=hashlib.sha256(SMALL).hexdigest())
        assert array.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert array.flags.writeable


PACKED = gzip.compress(SMALL, mtime=0)
BROKEN = {
    "missing": (None, "There is no file"),
    "empty": (b"", "is empty"),
    "text": (b"<html>no such page</html>", "is not an idx file: its magic number is 3c 68 74 6d"),
    "type": (b"\0\0\x0a\1\0\0\0\0", "is not an idx file"),
    "no dimension": (b"\0\0\x08\0", "is not an idx file"),
    "header": (SMALL[:9], "is cut short: it ends inside its header of 2 sizes"),
    "elements": (SMALL[:-1], r"promises 12 bytes of elements \(3x4\), it holds 11"),
    "trailing": (SMALL + b"\0", "has trailing bytes after the 12"),
    "too many sizes": (struct.pack(">4B200I", 0, 0, 8, 200, *[0] * 200), "no array can have"),
    "gz cut": (PACKED[:-9], "is cut short: its gzip stream ends"),
    "gz checksum": (PACKED[:-8] + b"\1\2\3\4" + PACKED[-4:], "is damaged: its gzip stream"),
    "gz data": (PACKED[:10] + b"\xff" * 4 + PACKED[14:], "is damaged: its gzip stream"),
    "gz trailing": (PACKED + b"more", "is damaged: its gzip stream"),
    "gz of trailing": (gzip.compress(SMALL + b"x"), "has trailing bytes"),
    "gz of short": (gzip.compress(SMALL[:-3]), "is cut short"),
    "gz of nothing": (gzip.compress(b""), "is empty"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    data, message = BROKEN[kind]
    path = tmp_path / "culprit-idx2-ubyte"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        idx.read(path)
    assert "culprit-idx2-ubyte" in str(caught.value)


def test_another_shape_or_content_is_refused() -> None:
    with pytest.raises(DataError, match=r"f holds 3x4 elements, where 4x3 are right"):
        idx.parse(SMALL, "f", shape=(4, 3))
    changed = SMALL[:-1] + b"\xff"
    with pytest.raises(DataError, match=r"f is altered or damaged: the SHA-256 .* is [0-9a-f]{64}, where"):
        idx.parse(changed, "f", sha256=hashlib.sha256(SMALL).hexdigest())


def test_a_header_that_promises_the_moon_fills_no_memory() -> None:
    with pytest.raises(DataError, match="is cut short"):
        idx.parse(struct.pack(">4B4I", 0, 0, 0x0E, 4, *[2**32 - 1] * 4) + b"few")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        idx.read(tmp_path)


def test_what_idx_cannot_hold_is_refused() -> None:
    with pytest.raises(DataError, match="int64 cannot be written as idx"):
        idx.dumps(np.zeros(3, dtype=np.int64))
    with pytest.raises(DataError, match="0 dimensions"):
        idx.dumps(np.array(3, dtype=np.uint8))
