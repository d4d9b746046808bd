"""Sealed files: tensors and facts in one safetensors file, under a digest that covers both. No pickle anywhere.

safetensors itself notices no flipped bit. The facts are JSON in the file's metadata, one entry under one key: with
several, their order would change from one writing to the next, and equal contents would not be equal files.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from prunus.errors import ArtefactError
from prunus.files import replacing


def write(path: Path, key: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and facts, whole or not at all."""
    with replacing(path) as temporary:
        temporary.touch()
        mode = (
            temporary.stat().st_mode
        )  # what the user's umask leaves; safetensors makes a file that no one else can read
        try:
            save_file(dict(tensors), temporary, metadata={key: sealed(tensors, facts)})
            with suppress(OSError):  # where there are no permissions to give
                temporary.chmod(mode)
        except SafetensorError as error:
            raise OSError(None, str(error)) from error


def sealed(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """The facts as text, with the digest in them."""
    return _text({**facts, "digest": digest(tensors, facts)})


def read(path: Path, key: str, what: str, schema: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and facts.

    Args:
        path: the file.
        key: under which its facts lie.
        what: what the facts are called when something is wrong with them.
        schema: the version of the facts that can be read.

    Raises:
        ArtefactError: the file is not there, is damaged, or is another kind of file.
    """
    try:
        there = path.is_file()
    except OSError:  # no file can have such a name
        there = False
    if not there:
        raise ArtefactError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:  # whatever a stranger's file makes the reader stumble over
        raise ArtefactError(f"{path} is damaged or no safetensors file ({str(error)[:120]}).") from error
    if key not in metadata:
        raise ArtefactError(f"{path} is a safetensors file, but not one of Prunus: it has no {what}.")
    try:
        facts = json.loads(metadata[key])
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{path} is damaged: its {what} is not JSON.") from error
    said = facts.pop("digest", None) if isinstance(facts, dict) else None
    if said is not None and said != digest(tensors, facts):
        raise ArtefactError(f"{path} is damaged: its weights or its {what} are not those that were saved.")
    if not isinstance(facts, dict) or type(facts.get("schema")) is not int or facts["schema"] != schema:
        raise ArtefactError(f"{path} has a {what} of another version (this Prunus reads schema {schema}).")
    if said is None:
        raise ArtefactError(f"{path} is damaged: its {what} has no digest.")
    return tensors, facts


def digest(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """What tells these tensors and facts from any others."""
    sum_ = hashlib.sha256(_text(facts).encode())
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        sum_.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        sum_.update(value.flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return sum_.hexdigest()


def _text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, separators=(",", ":"))
