"""What gates cost in training, and what shrinking saves: ratios, measured side by side in one process.

A machine's load changes while it is measured. So dense and gated steps come in short blocks that take turns, the order
of each pair alternating, and what is reported is the median of the pairs' ratios with its interquartile range.
"""

import copy
import os
import time
import warnings
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from prunus.budget import Budget
from prunus.errors import ModelError
from prunus.front import gate, shrink
from prunus.gated import Gated
from prunus.measure import evaluating, latencies, with_batch
from prunus.receipt import versions

TARGET = 0.10  # the budget on parameters that gated steps press for, and that the shrunk network meets
SEED = 0


def measure(
    model: nn.Module, inputs: Any, *, batch: int = 128, blocks: int = 20, steps: int = 20, device: str | None = None
) -> dict[str, Any]:
    """Measure one model.

    Args:
        model: a dense model that maps a tensor to class scores.
        inputs: example inputs, one tensor.
        batch: examples a training step.
        blocks: pairs of blocks.
        steps: steps a block.
        device: where; a CUDA device if there is one, else the CPU.

    Returns:
        `step` (milliseconds of a dense and a gated step, and their ratio), `latency_ms` by batch size (dense, shrunk,
        and how many times faster), `shrink_seconds`, `memory` (peak bytes of a dense and a gated step, and their
        ratio).
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    x = _batch(inputs, batch).to(where)
    torch.manual_seed(SEED)
    dense = copy.deepcopy(model).to(where)
    y = torch.randint(_classes(dense, x), (batch,), device=where)
    gated = gate(copy.deepcopy(model).to(where), x[:2])
    budget = _budget(gated)
    variants = {"dense": _step(dense, None, x, y), "gated": _step(gated, budget, x, y)}
    result: dict[str, Any] = {"batch": batch, "device": _name(where)}
    result["memory"] = _memory(model, x, y)
    result["step"] = _turns(variants, blocks, steps, where)
    small, seconds = _shrunk(model, x[:2])
    result["shrink_seconds"] = round(seconds, 4)
    result["latency_ms"] = _latency(copy.deepcopy(model).to(where), small, x, sorted({1, batch}))
    return result


def machine() -> dict[str, Any]:
    """What it was measured on."""
    return {"threads": torch.get_num_threads(), "versions": versions()}


def _batch(inputs: Any, batch: int) -> Tensor:
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if len(tensors) != 1:
        raise ModelError(f"The benchmark takes models of one input tensor; this one has {len(tensors)}.")
    one: Tensor = with_batch((tensors[0],), batch)[0][0]
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(one.shape, generator=generator) if one.is_floating_point() else one


def _classes(model: nn.Module, x: Tensor) -> int:
    with evaluating(model):
        scores = model(x[:2])
    if not isinstance(scores, Tensor) or scores.dim() != 2:
        raise ModelError(
            "The benchmark's loss is the cross-entropy: a model must return a row of class scores an example."
        )
    return int(scores.shape[1])


def _budget(gated: Gated) -> Budget:
    return Budget(gated, params=TARGET, dual_rate=1e-3)


def _step(network: nn.Module, budget: Budget | None, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One training step, as a user's loop has it."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    network.train()

    def step() -> None:
        loss = F.cross_entropy(network(x), y)
        if budget is not None:
            loss = loss + budget.pressure()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if budget is not None:
            budget.step()

    return step


def _turns(variants: dict[str, Callable[[], None]], blocks: int, steps: int, where: torch.device) -> dict[str, Any]:
    """Blocks of steps that take turns; the medians, and the median and spread of the pairs' ratios."""
    for step in variants.values():
        for _ in range(min(5, steps)):
            step()
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for block in range(blocks):
        for name in names if block % 2 == 0 else reversed(names):
            times[name].append(_seconds(variants[name], steps, where) * 1e3 / steps)
    ratios = [gated / dense for gated, dense in zip(times["gated"], times["dense"], strict=True)]
    return {**{f"{name}_ms": round(median(values), 4) for name, values in times.items()}, "ratio": _spread(ratios)}


def _seconds(step: Callable[[], None], steps: int, where: torch.device) -> float:
    _wait(where)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(where)
    return time.perf_counter() - start


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def _spread(values: list[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4)
    return {"median": round(median(values), 4), "spread": round(high - low, 4)}


def _memory(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Peak bytes of tensors in the first two steps: weights, gradients, optimizer, activations, the batch itself."""
    peaks = {}
    for name in ("gated", "dense", "gated"):  # the first is for the libraries' own workspaces on a device
        network: nn.Module = copy.deepcopy(model).to(x.device)
        budget = None
        if name == "gated":
            gated = gate(network, x[:2])
            network, budget = gated, _budget(gated)
        peaks[name] = _peak(_step(network, budget, x, y), network, (x, y))
    return {**peaks, "ratio": round(peaks["gated"] / peaks["dense"], 4)}


def _peak(step: Callable[[], None], network: nn.Module, batch: tuple[Tensor, ...]) -> int:
    where = batch[0].device
    if where.type == "cuda":
        _wait(where)
        others = torch.cuda.memory_allocated(where) - _held(network, batch)
        torch.cuda.reset_peak_memory_stats(where)
        step()
        step()
        _wait(where)
        return int(torch.cuda.max_memory_allocated(where) - others)
    os.environ.setdefault("KINETO_LOG_LEVEL", "100")  # or the profiler writes to stderr that it begins
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=False) as profile:
        step()
        step()
    running = peak = 0
    changes = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(changes, key=lambda event: event.start_ns()):
        running += event.nbytes()
        peak = max(peak, running)
    return _held(network, batch) + peak


def _held(network: nn.Module, batch: tuple[Tensor, ...]) -> int:
    """Bytes that are there before the first step."""
    tensors = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers(), *batch)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _shrunk(model: nn.Module, inputs: Tensor) -> tuple[nn.Module, float]:
    """A network that meets the budget from random gates, and the seconds that `prunus.shrink` took."""
    gated = gate(copy.deepcopy(model).to(inputs.device), inputs)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(SEED)
        gated.log_alpha.copy_(torch.randn(gated.units, generator=generator))
    _budget(gated)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the landing has much to close is the plan
        start = time.perf_counter()
        small, _ = shrink(gated, inputs)
        return small, time.perf_counter() - start


def _latency(dense: nn.Module, small: nn.Module, x: Tensor, batches: list[int]) -> dict[str, Any]:
    """Forward passes by batch size, dense and shrunk taking turns."""
    result = {}
    with evaluating(dense, small):
        for batch in batches:
            some = x[:batch]
            calls = {"dense": lambda some=some: dense(some), "shrunk": lambda some=some: small(some)}
            measured = latencies(calls, 0.3, x.device)
            faster = measured["dense"]["median"] / max(1e-9, measured["shrunk"]["median"])
            result[str(batch)] = {**measured, "faster": round(faster, 3)}
    return result


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
