"""The idx format of MNIST: read whole or refused, never guessed.

A file is two zero bytes, a code for the element type, the number of dimensions, each size as a big-endian uint32, and
then the elements in row-major order with nothing after them. Gzip around it is optional.
"""

import gzip
import hashlib
import io
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prunus.errors import DataError

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP = b"\x1f\x8b"
_CHUNK = 1 << 20


class _Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read(path: Path | str, *, shape: Sequence[int] | None = None, sha256: str | None = None) -> NDArray[np.generic]:
    """Read an idx file, gzipped or not, and refuse it unless every byte is accounted for.

    Args:
        path: The file.
        shape: If given, the only shape accepted.
        sha256: If given, the SHA-256 that the unpacked bytes must have. Gzip's own bytes differ between packers.

    Raises:
        DataError: The file is missing, damaged, not idx, or not the one asked for.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP
            raw.seek(0)
            if not packed:
                return _parse(raw, str(path), shape, sha256)
            with gzip.GzipFile(fileobj=raw) as unpacked:
                return _parse(unpacked, str(path), shape, sha256)
    except FileNotFoundError:
        raise DataError(f"There is no file {path}; an idx file such as MNIST's is expected there.") from None
    except EOFError:
        raise DataError(f"{path} is cut short: its gzip stream ends before its end mark; get it anew.") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged: its gzip stream cannot be unpacked ({error}); get it anew.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def parse(
    data: bytes, source: str = "the data", *, shape: Sequence[int] | None = None, sha256: str | None = None
) -> NDArray[np.generic]:
    """Read unpacked idx bytes; `source` is what errors call them.

    >>> parse(dumps(np.array([[1, 2], [3, 4]], dtype=np.uint8)))
    array([[1, 2],
           [3, 4]], dtype=uint8)
    >>> parse(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7]), "short.idx")
    Traceback (most recent call last):
    ...
    prunus.errors.DataError: short.idx is cut short: its header promises 3 bytes of elements (3), it holds 1.
    """
    return _parse(io.BytesIO(data), source, shape, sha256)


def dumps(array: NDArray[np.generic]) -> bytes:
    """Give the idx bytes of an array.

    >>> dumps(np.array([7, 9], dtype=np.uint8)).hex(" ")
    '00 00 08 01 00 00 00 02 07 09'
    """
    codes = {np.dtype(kind).newbyteorder("="): code for code, kind in TYPES.items()}
    code = codes.get(array.dtype.newbyteorder("="))
    if code is None:
        raise DataError(f"An array of {array.dtype} cannot be written as idx; convert it to one of {_kinds()}.")
    if not 1 <= array.ndim <= 255:
        raise DataError(f"An array of {array.ndim} dimensions cannot be written as idx; 1 to 255 are possible.")
    header = struct.pack(f">4B{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(TYPES[code]).tobytes()


def _kinds() -> str:
    return ", ".join(np.dtype(kind).name for kind in TYPES.values())


def _parse(file: _Reader, source: str, shape: Sequence[int] | None, sha256: str | None) -> NDArray[np.generic]:
    magic = file.read(4)
    if not magic:
        raise DataError(f"{source} is empty; an idx file begins with a header of at least 8 bytes.")
    if len(magic) < 4:
        raise DataError(f"{source} is cut short: it ends inside its magic number of 4 bytes.")
    zeros, code, dims = magic[:2], magic[2], magic[3]
    if zeros != b"\0\0" or code not in TYPES or dims == 0:
        raise DataError(
            f"{source} is not an idx file: its magic number is {magic.hex(' ')}, where 00 00, a type of "
            f"{', '.join(f'{known:02x}' for known in TYPES)} and a count of dimensions from 1 to 255 belong."
        )
    header = file.read(4 * dims)
    if len(header) < 4 * dims:
        raise DataError(f"{source} is cut short: it ends inside its header of {dims} sizes.")
    sizes = struct.unpack(f">{dims}I", header)
    # Before any element is read, so that a hostile header cannot fill the memory of a reader that knows its shape.
    if shape is not None and sizes != tuple(shape):
        raise DataError(f"{source} holds {_by(sizes)} elements, where {_by(shape)} are right.")
    kind = np.dtype(TYPES[code])
    promised = math.prod(sizes) * kind.itemsize
    digest = hashlib.sha256(magic + header)
    chunks: list[bytes] = []
    held = 0
    # In pieces: asking for `promised` bytes at once would allocate them before knowing that they are there.
    while held < promised and (chunk := file.read(min(_CHUNK, promised - held))):
        chunks.append(chunk)
        digest.update(chunk)
        held += len(chunk)
    if held < promised:
        raise DataError(
            f"{source} is cut short: its header promises {promised} bytes of elements ({_by(sizes)}), it holds {held}."
        )
    # For gzip this read also reaches the end mark, where the checksum is compared.
    if file.read(1):
        raise DataError(f"{source} has trailing bytes after the {promised} that its header promises ({_by(sizes)}).")
    if sha256 is not None and digest.hexdigest() != sha256:
        raise DataError(
            f"{source} is altered or damaged: the SHA-256 of its unpacked content is {digest.hexdigest()}, "
            f"where {sha256} is right."
        )
    # A bytearray, so that the array is writable and torch takes it without a copy.
    flat = np.frombuffer(bytearray().join(chunks), dtype=kind)
    try:
        array = flat.reshape(sizes)
    except ValueError as error:
        raise DataError(f"{source} has a shape that no array can have: {_by(sizes)} ({error}).") from error
    return array.astype(kind.newbyteorder("="), copy=False)


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
