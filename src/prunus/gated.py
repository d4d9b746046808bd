"""A model with gates on everything that can shrink, applied from outside.

`Gated` holds the user's model, its graph, and one flat tensor of log alpha for all gates. A forward pass draws one
sample of all gates at once, lays it out along the axes of the weights that read gated units, and calls the model with
those weights multiplied (`torch.func.functional_call`): the user's state-dict keys stay what they were, and a unit
whose gate is zero is ignored exactly, whatever stands between its producer and its readers.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from prunus.axes import Graph, Keep
from prunus.cost import MEASURES, Cost
from prunus.errors import ModelError, is_number, nearest, several
from prunus.gates import (
    Draw,
    DrawAndMultiply,
    Estimator,
    GateInputs,
    HardConcrete,
    Multiply,
    Sites,
    lay,
    never_recomputed,
)
from prunus.graph import matches, stored_tensors
from prunus.measure import batch_size, rounded
from prunus.openness import Openness, whole_step
from prunus.rounds import Round, rounds_of

CLOSED = 1e3  # below every log alpha, and small enough that ties among closed gates are still broken
NOISE = 0.01  # the papers draw initial locations from a normal of this deviation


class Gated(nn.Module):
    """A gated model.

    Args:
        model: the user's model; it is trained in place, its keys stay as they are.
        graph: its analysis.
        keep: initial keep probability of all gates, or by group pattern ({"fc1.inputs": 0.8}; "*" for the rest).
        rescale: divide gated weights by the keep probability, so that a gated layer starts at the dense layer's scale.
        gates: the gates' distribution.
        estimate: the test-time gate, "median" or "noiseless" (001 eq. 13).
        per_example: draw one sample for every example of a mini-batch instead of one for all.
        round_to: the widths that surgery leaves are multiples of it (`prunus.openness.Openness`).
    """

    log_alpha: nn.Parameter

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        *,
        keep: float | Mapping[str, float] = 0.5,
        rescale: bool = True,
        gates: HardConcrete | None = None,
        estimate: Estimator = "median",
        per_example: bool = False,
        round_to: int = 1,
    ) -> None:
        super().__init__()
        if gates is not None and not isinstance(gates, HardConcrete):
            raise ModelError(f"gates is a {type(gates).__name__}; the gates' distribution is a prunus.HardConcrete.")
        if per_example and graph.scattered:
            raise ModelError("per_example draws gates for whole units, not for weights or blocks where they stand.")
        if per_example and graph.entangled:
            raise ModelError(
                f"per_example multiplies gates into the inputs of linear layers and convolutions; {graph.entangled[0]} "
                "is used in another way too: freeze its groups, or draw one sample a mini-batch."
            )
        self.round_to = whole_step(round_to, graph)
        self.model = model
        self.graph = graph
        self.gates = gates or HardConcrete()
        self.estimate = estimate
        self.threshold = self.gates.threshold(estimate)
        self.per_example = per_example
        self.cost = Cost(graph)
        self.budget: Any = None  # the budget made for it last: what the landing and the receipt speak of
        self.units = self.cost.units
        reference = next(model.parameters())
        probabilities = self._initial(keep)
        location = torch.special.logit(probabilities) + NOISE * torch.randn(self.units)
        self.log_alpha = nn.Parameter(location.to(reference.device))
        self._lay_out(reference.device)
        gated_names = {axis.tensor for axis in graph.sites()} | set(graph.scattered)
        self._shared = [
            (a, name) for a, name in graph.aliases.items() if name in gated_names and not self._one(a, name)
        ]
        self._mask: Tensor | None = None
        self._noisy = True
        self.landing: dict[str, Any] | None = None
        self.form = "auto"  # of surgery, as asked for
        _show_allocator()
        if rescale and self.units:
            with torch.no_grad():
                for start, stop, n, m in self.openness.most:  # of which no more than that share is ever open
                    probabilities[start:stop].clamp_(max=n / m)
                open_ = probabilities.to(self.log_alpha)
                for name, weight in self._multiplied(1 / open_).items():
                    self.model.get_parameter(name).copy_(weight)

    def _initial(self, keep: float | Mapping[str, float]) -> Tensor:
        by_pattern = dict(keep) if isinstance(keep, Mapping) else {"*": keep}
        names = [group.name for group in self.graph.groups]
        for pattern, value in by_pattern.items():
            if not is_number(value):
                raise ModelError(f"keep is {value!r}; write a probability between 0 and 1, or one a group pattern.")
            self.gates.locate(float(value))  # refuses what is no probability
            if pattern != "*" and not any(matches(name, [pattern]) for name in names):
                raise ModelError(f"keep: no group matches {pattern!r}; {nearest(pattern, names)}.")
        parts = []
        for group in self.graph.groups:
            found = [
                value for pattern, value in by_pattern.items() if pattern != "*" and matches(group.name, [pattern])
            ]
            parts.append(torch.full((group.size,), float(found[-1] if found else by_pattern.get("*", 0.5))))
        return torch.cat(parts) if parts else torch.zeros(0)

    def _one(self, alias: str, name: str) -> bool:
        """Are they one tensor of one module that has two names, and not two modules that share a tensor?"""
        one, two = (
            (self.model.get_submodule(path), leaf) for path, _, leaf in (n.rpartition(".") for n in (alias, name))
        )
        return one[0] is two[0] and one[1] == two[1]

    def _lay_out(self, device: torch.device) -> None:
        """Prepare index tensors once: for every position of every gated axis, the gates that multiply there.

        A weight that carries gates along two dimensions is multiplied in two rounds.
        """
        self._rounds, indices = rounds_of(self.model, self.graph, self.cost.offsets, self.units)
        for one, index in zip(self._rounds, indices, strict=True):
            self.register_buffer(one.index, index, persistent=False)
        self.inside = self.graph.inside()
        self.openness = Openness(self.graph, self.round_to)
        self._whole = copy.deepcopy(self.cost.whole)  # moves with the gates; the cost itself stays on the CPU
        self.to(device)

    # ---- the forward pass ------------------------------------------------------------------------------------------

    def sample(self, examples: int | None = None) -> Tensor:
        """Draw all gates once (or once an example): (units,) or (examples, units). Differentiable in log alpha.

        Log alpha is brought back into its range first, through `.data`: an earlier forward pass of the same step may
        still need its graph.
        """
        shape = (self.units,) if examples is None else (examples, self.units)
        if not self._noisy:
            z = self.gates.estimate(self.log_alpha.detach(), self.estimate).expand(shape)
        else:
            noise = self._noise(shape)  # becomes its own logit in drawing
            z = Draw.apply(self.log_alpha, noise, self.gates)
            if self.openness.most and self._mask is None:  # training sees what will be deployed
                z = z * self.openness.limited(noise + self.log_alpha.detach())
        return z if self._mask is None else z * self._mask

    def _noise(self, shape: tuple[int, ...]) -> Tensor:
        self.gates.clamp_(self.log_alpha)
        return torch.rand(shape, device=self.log_alpha.device, dtype=self.log_alpha.dtype)

    def test_gates(self) -> Tensor:
        """All gates as they stand at test time, without noise."""
        z = self.gates.estimate(self.log_alpha.detach(), self.estimate)
        if self._mask is not None:
            return z * self._mask
        return z * self.openness.limited(self.openness.key(self.log_alpha)).to(z.dtype) if self.openness.most else z

    def _along_sites(self, z: Tensor, number: int = 0) -> tuple[Tensor, ...]:
        """What multiplies at every position of every gated axis of a round, one tensor an axis."""
        index = getattr(self, self._rounds[number].index)
        if index is not None:
            z = lay(F.pad(z, (0, 1), value=1.0), index)
        return z.split(self._rounds[number].lengths, dim=-1)

    def _multiplied(self, z: Tensor) -> dict[str, Tensor]:
        """The weights with one sample of gates multiplied in."""
        result: dict[str, Tensor] = {}
        if self.graph.scattered:
            for tensor, gate in self._scattered(z):
                weight = self.model.get_parameter(tensor)
                result[tensor] = weight * gate.to(weight.dtype)
            return result
        for one in self._rounds:
            weights = [result.get(name, weight) for name, weight in zip(one.names, one.weights(), strict=True)]
            products = Multiply.apply(z, self._laid_out(one), *weights)
            result.update(zip(one.names, products, strict=True))
        return result

    def _scattered(self, z: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What multiplies at every place of the weights that are removed where they stand."""
        parts = dict(zip(self.graph.sizes, z.split(list(self.graph.sizes.values())), strict=True))
        for tensor, layout in self.graph.scattered.items():
            yield tensor, layout.over(parts, self.graph.tensors[tensor].shape)

    def _laid_out(self, one: Round) -> Sites:
        return Sites(getattr(self, one.index), one.lengths, one.shapes)

    def _sampled(self) -> dict[str, Tensor]:
        """The weights with a fresh sample of the gates multiplied in."""
        if self._mask is not None or not self._noisy or len(self._rounds) != 1:
            return self._multiplied(self.sample())
        noise, one = self._noise((self.units,)), self._rounds[0]
        products = DrawAndMultiply.apply(self.log_alpha, noise, self.gates, self._laid_out(one), *one.weights())
        return dict(zip(one.names, products, strict=True))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward pass, under one sample of the gates (in evaluation mode: the test-time gates)."""
        if self.training and self.per_example and self._rounds:
            return self._forward_per_example(*args, **kwargs)
        weights = self._sampled() if self.training else self._multiplied(self.test_gates())
        for alias, name in self._shared:
            weights[alias] = weights[name]
        with never_recomputed():
            return functional_call(self.model, weights, args, kwargs, tie_weights=False)

    def _forward_per_example(self, *args: Any, **kwargs: Any) -> Any:
        batch = batch_size(args, kwargs)
        gates = self._along_sites(self.sample(batch))
        names = self._rounds[0].names
        table = {id(self.model.get_parameter(t)): (g, t) for t, g in zip(names, gates, strict=True)}
        with GateInputs(table, batch), never_recomputed():
            return self.model(*args, **kwargs)

    # ---- what the gates say ----------------------------------------------------------------------------------------

    def p_active(self, alone: bool = False) -> Tensor:
        """The probability of every unit to be non-zero, differentiable: (units,).

        Where at most n of every m weights stay, their sum is exact (`prunus.scatter.shared`); with `alone` it is every
        gate's own probability, as if there were no others.
        """
        if self._mask is None:
            p = self.gates.p_active(self.log_alpha)
            return p if alone else self.openness.expected(p)
        return self.gates.p_active(self.log_alpha) * self._mask if self._noisy else self._mask

    def open_units(self, log_alpha: Tensor | None = None) -> Tensor:
        """The units that surgery will keep, 0 or 1 in float64: (units,); or would keep at other locations."""
        key = self._key(log_alpha)
        return self.openness.kept(key, self.threshold) if self.units else key

    def asked_units(self, log_alpha: Tensor | None = None) -> Tensor:
        """Those of them that are there by their own gates, and not to make a width round."""
        key = self._key(log_alpha)
        return self.openness.asked(key, self.threshold) if self.units else key

    def _key(self, log_alpha: Tensor | None) -> Tensor:
        key = self.openness.key(self.log_alpha if log_alpha is None else log_alpha)
        return key if self._mask is None else key - CLOSED * (self._mask == 0)

    def nearly_open(self) -> Tensor:
        """The same, but that empty groups stay empty: in few operations, for every step's dual update."""
        return self.openness.nearly_kept(self.log_alpha, self.threshold)

    def keep(self) -> Keep:
        """The units that surgery will keep."""
        flat = self.open_units().bool().cpu()
        parts = flat.split([group.size for group in self.graph.groups]) if self.units else ()
        units = {g.name: part for g, part in zip(self.graph.groups, parts, strict=True)}
        return Keep(self.graph, units, rounded=self.round_to > 1)

    def expected(self) -> dict[str, float]:
        """The expected cost under the gates' distribution."""
        with torch.no_grad():
            return dict(zip(MEASURES, self._whole(self.p_active()).tolist(), strict=True))

    def deployed(self) -> dict[str, int]:
        """The cost after surgery, if it were done now."""
        return dict(zip(MEASURES, (rounded(v) for v in self._whole(self.open_units()).tolist()), strict=True))

    def fold(self) -> dict[str, Tensor]:
        """The weights with the test-time gates multiplied in, by canonical name: what surgery needs of the gates."""
        with torch.no_grad():
            return {name: weight.detach() for name, weight in self._multiplied(self.test_gates()).items()}

    def expected_l2(self, detach: bool = False, ungated: bool = True) -> Tensor:
        """The expected squared L2 norm of the weights under their gates.

        E||theta||^2 = sum_g P(z_g != 0) sum_{j in g} theta_j^2 (001 eq. 15 and 17). `detach` leaves the probabilities
        out of the gradient, as WideResNet training does; `ungated` adds the plain squares of all other parameters.
        """
        p = self.p_active()
        p = p.detach() if detach else p
        total = p.new_zeros(())
        gated_names: set[str] = set(self.graph.scattered)
        for tensor, open_ in self._scattered(p) if self.graph.scattered else ():
            total = total + (self.model.get_parameter(tensor).float().square() * open_).sum()
        squares: dict[str, Tensor] = {}
        for number, one in enumerate(self._rounds):
            for tensor, shape, open_ in zip(one.names, one.shapes, self._along_sites(p, number), strict=True):
                square = squares.get(tensor)
                square = self.model.get_parameter(tensor).float().square() if square is None else square
                squares[tensor] = square * open_.view(shape)
        total = total + sum(square.sum() for square in squares.values())
        gated_names |= set(squares)
        if ungated:
            for name, parameter in self.model.named_parameters():
                if name not in gated_names:
                    total = total + parameter.float().square().sum()
        return total

    # ---- after the landing -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def close(self, units: Tensor) -> None:
        """Close gates for good: `units` is true where a gate is to be zero."""
        self.log_alpha.data.masked_fill_(units.to(self.log_alpha.device), self.gates.low)

    def fix(self, noise: bool) -> None:
        """Fix which units are open; the weights train on, with the open gates' noise or without it."""
        self._mask = self.open_units().to(self.log_alpha.dtype)
        self._noisy = noise
        self.log_alpha.requires_grad_(False)

    @property
    def fixed(self) -> bool:
        """Are the gates fixed?"""
        return self._mask is not None

    def weight_parameters(self) -> Iterator[nn.Parameter]:
        """The user's own parameters."""
        return self.model.parameters()

    def gate_parameters(self) -> Iterator[nn.Parameter]:
        """The gates' locations: one flat tensor."""
        yield self.log_alpha

    def get_extra_state(self) -> dict[str, Any]:
        """What `state_dict` keeps beside the tensors: whether and how the gates are fixed."""
        return {"mask": self._mask, "noisy": self._noisy, "round_to": self.round_to}

    def set_extra_state(self, state: Any) -> None:
        """Read it back."""
        there = state.get("round_to", 1)
        if there != self.round_to:
            raise ModelError(
                f"This state was made with round_to={there}, and the model was gated with round_to={self.round_to}: "
                "gate it with the same."
            )
        self._mask = None if state["mask"] is None else state["mask"].to(self.log_alpha.device)
        self._noisy = bool(state["noisy"])
        self.log_alpha.requires_grad_(self._mask is None)

    def _apply(self, fn: Any, recurse: bool = True) -> "Gated":
        """Move or convert: the gates stay in float32 at least, and costs count the weights as they are then."""
        super()._apply(fn, recurse)
        if self.log_alpha.dtype in (torch.float16, torch.bfloat16):
            self.log_alpha.data = self.log_alpha.data.float()
        stored = stored_tensors(self.model)[0]
        if stored != self.graph.tensors:
            self.graph = replace(self.graph, tensors=stored)
            self.cost = Cost(self.graph)
            self._whole = copy.deepcopy(self.cost.whole).to(self.log_alpha.device)
            if self.budget is not None:
                self.budget.count()
        return self

    def extra_repr(self) -> str:
        """How many units of which groups carry gates, and what part of the cost they reach."""
        if not self.units:
            return "nothing can shrink: " + "; ".join(f"{f.axis} ({f.operation})" for f in self.graph.frozen[:4])
        listed = ", ".join(f"{g.name}: {g.size} {several(g.unit, g.size)}" for g in self.graph.groups[:8])
        more = f" and {len(self.graph.groups) - 8} more groups" if len(self.graph.groups) > 8 else ""
        return f"{self.units:,} units in {len(self.graph.groups)} groups ({listed}{more})"


def _show_allocator() -> None:
    """Let the C library see one large block come and go, untouched.

    glibc hands free memory back to the system after every step, and takes it again page by page in the next one, unless
    it has once freed a block larger than what is at issue; 32 MiB is the most it learns from. On a CPU that can double
    the time of a small model's step, gated or not.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)
