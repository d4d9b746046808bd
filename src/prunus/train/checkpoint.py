"""Checkpoints: everything a run needs to go on bit for bit, in one safetensors file that is replaced at once.

Tensors lie flat under dotted names; what is no tensor (epoch, settings, where the log ends, …) is JSON in the metadata.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunus import sealed
from prunus.errors import ArtefactError

KEY = "checkpoint"
NAME = "state.safetensors"
SCHEMA = 1


def write(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a checkpoint, whole or not at all."""
    flat = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    sealed.write(folder / NAME, KEY, flat, {"schema": SCHEMA, **facts})


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint.

    Raises:
        ArtefactError: there is none, or it is damaged.
    """
    path = folder / NAME
    if not path.is_file():
        raise ArtefactError(f"There is no checkpoint at {path} to resume from; leave --resume out to start anew.")
    return sealed.read(path, KEY, "state", SCHEMA)


def module_tensors(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a module, persistent or not, shared ones once."""
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    return {f"{prefix}.{name}": value for name, value in named.items()}


@torch.no_grad()
def restore_module(prefix: str, module: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Put them back.

    Raises:
        ArtefactError: they are another model's.
    """
    for name, value in module_tensors(prefix, module).items():
        if name not in tensors or tensors[name].shape != value.shape:
            theirs = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise ArtefactError(
                f"The checkpoint {where} belongs to another model: for {name.removeprefix(prefix + '.')!r} it holds "
                f"{theirs}, this model {tuple(value.shape)}."
            )
        value.data.copy_(tensors[name])


def optimizer_tensors(prefix: str, optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors of an optimizer's state."""
    state = optimizer.state_dict()["state"]
    return {
        f"{prefix}.{index}.{key}": torch.as_tensor(value)
        for index, entry in state.items()
        for key, value in entry.items()
        if value is not None
    }


def restore_optimizer(prefix: str, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put them back; the groups' rates are the schedule's business."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(prefix + "."):
            index, key = name.removeprefix(prefix + ".").split(".", 1)
            state.setdefault(int(index), {})[key] = value.clone()
    whole = optimizer.state_dict()
    whole["state"] = state
    optimizer.load_state_dict(whole)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that draw gates and dropout."""
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Put them back."""
    torch.set_rng_state(tensors["random.cpu"])
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
