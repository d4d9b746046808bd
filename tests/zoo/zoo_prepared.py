"""Models of the zoo analysed, proved, exported and gated once, for all tests that ask for them."""

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from zoo_models import ZOO

from prunus.axes import Graph
from prunus.gated import Gated
from prunus.graph import analyse
from prunus.surgery import Exported, Inputs, prove, slice_model
from prunus.surgery.artefact import plan_of
from prunus.surgery.verify import _trial

# Whose own code holds sizes as numbers, in views, splits or pads, and so runs smaller as exported operations alone.
GRAPH = {
    "lenet5", "resnet_padded", "shufflenet", "shufflenet_v1", "gan_generator", "vit", "vit_explicit", "swin",
    "einsum_attention",
}  # fmt: skip
EAGER = [name for name in ZOO if name not in GRAPH and name != "control_flow"]
EVERYTHING = ("structured", "head_dims", "width")
HEAVY = {"resnet50", "resnet56", "preact_resnet", "hf_t5", "hf_whisper", "hf_mistral", "torch_decoder", "conv_gru"}


def slow_if_heavy(names: Iterable[str]) -> Any:
    """Tests of every model by name, those of the largest among the slow."""
    marks = {True: pytest.mark.slow, False: ()}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name in HEAVY]) for name in names])


def both_forms(names: Iterable[str]) -> Any:
    """Tests of every model in the form that it is shrunk to, and of its graph form where that is another; slow ones."""
    names = list(names)
    marks = {True: pytest.mark.slow, False: ()}
    own = [pytest.param(name, own_form(name), id=name, marks=marks[name in HEAVY]) for name in names]
    more = [pytest.param(name, "graph", id=f"{name}-graph", marks=pytest.mark.slow) for name in names if name in EAGER]
    return pytest.mark.parametrize("name, form", [*own, *more])


def own_form(name: str) -> str:
    """The form that a model is shrunk to where nothing else is asked for."""
    return "graph" if name in GRAPH else "eager"


def inputs_of(name: str) -> Inputs:
    return Inputs.of(ZOO[name].inputs())


@cache
def dense(name: str) -> nn.Module:
    return ZOO[name].make().eval()


@cache
def analysed(name: str, units: Any = "structured") -> tuple[Graph, float]:
    """What can shrink, and the seconds that it took to find it."""
    inputs = inputs_of(name)
    start = time.process_time()
    graph = analyse(dense(name), inputs.args, inputs.kwargs, units=units)
    return graph, time.process_time() - start


@cache
def proven(name: str, units: Any = "structured") -> Graph:
    return prove(dense(name), analysed(name, units)[0], inputs_of(name))


@cache
def exported(name: str) -> Exported:
    return Exported(dense(name), inputs_of(name))


@cache
def gated_of(name: str, units: Any = "structured") -> Gated:
    return Gated(dense(name), analysed(name, units)[0], rescale=False).eval()


def gated_at(name: str, density: float, units: Any = "structured") -> Gated:
    """The gated model with about that share of its gates open, one in every group that cannot vanish, no two alike."""
    gated = gated_of(name, units)
    generator = torch.Generator().manual_seed(round(100 * density))
    parts = []
    for group in gated.graph.groups:
        open_ = torch.rand(group.size, generator=generator) < density
        open_[int(torch.randint(group.size, (1,), generator=generator))] |= not group.vanishes
        location = 1 + 2 * torch.rand(group.size, generator=generator)  # gates between 0.8 and 1
        parts.append(torch.where(open_, location, -4 - location))
    with torch.no_grad():
        gated.log_alpha.copy_(torch.cat(parts))
    return gated


def shrunk(name: str, gated: Gated, form: str) -> nn.Module:
    keep = gated.keep()
    small = slice_model(dense(name), gated.graph, keep, gated.fold(), form)
    if form == "graph":
        small = exported(name).shrunk(gated.graph, keep, small)
    small.prunus_plan = plan_of(gated.graph, keep, form, inputs_of(name))  # type: ignore[assignment]
    return small


@cache
def half(name: str, form: str) -> nn.Module:
    """About half of everything removed; not to be changed."""
    return shrunk(name, gated_at(name, 0.5), form).eval()


@cache
def trial_of(name: str, form: str) -> Any:
    """What proving tries removals on, in one form alone."""
    trial = _trial(dense(name), inputs_of(name))
    return trial if form == "eager" else replace(trial, exported=exported(name))
