"""Extrapolation from the past: the steadiness of extragradient on min-max problems for one gradient a step.

Gidel, Berard, Vignoud, Vincent and Lacoste-Julien, "A Variational Inequality Perspective on Generative Adversarial
Networks" (ICLR 2019), "extrapolation from the past"; seed 004, section 3.3, names it for the Lagrangian of a budget.
With F the players' gradients and eta the rate, the paper keeps two points:

    extrapolate   x_{t+1/2} = x_t - eta F(x_{t-1/2})
    update        x_{t+1}   = x_t - eta F(x_{t+1/2})

Here the update is the wrapped optimizer's, whatever it is, and where the paper extrapolates with the past gradient we
repeat the past update: x_{t+3/2} = x_{t+1} + (x_{t+1} - x_t). For SGD the two are the same. For Adam they differ from
the paper's ExtraAdam, which feeds each gradient to the moments twice: ours feeds it once. The first gradient is taken
at x_0, there being no past. In the extrapolated points y_t alone, SGD becomes the optimistic gradient method
y_{t+1} = y_t - eta (2 g_t - g_{t-1}): y_{t+1} = x_{t+1} - eta g_t = x_t - 2 eta g_t, and x_t = y_t + eta g_{t-1}.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from prunus.errors import PrunusError

_KEY = "settled"  # where x_t lies in the wrapped optimizer's state of a parameter


class ExtrapolationFromThePast(Optimizer):
    """Wrap an optimizer so that gradients are taken at an extrapolated point, in a game that plain descent circles in.

    Wrap each player's optimizer, call `backward` once, then each one's `step`. Between steps the parameters hold the
    extrapolated point; the settled point x_t lies in the wrapped optimizer's state, so `state_dict` carries it, and a
    run resumes exactly where model and optimizer are both restored. It is an `Optimizer`: schedulers, `GradScaler` and
    accelerate take it as it is. From the second step on, all that is kept is updated in place.

    What is put into the parameters by hand between steps moves the extrapolated point only. A projection must be
    applied to both: once as it is, and once more inside `settled()`, whose changes last.

    Args:
        optimizer: any optimizer whose `step` needs no closure.

    >>> x, y = torch.tensor([1.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    >>> players = [
    ...     ExtrapolationFromThePast(torch.optim.SGD([x], lr=0.3)),
    ...     ExtrapolationFromThePast(torch.optim.SGD([y], lr=0.3, maximize=True)),
    ... ]
    >>> for _ in range(200):
    ...     x.grad, y.grad = None, None
    ...     (x * y).sum().backward()
    ...     for player in players:
    ...         player.step()
    >>> bool(x.abs() + y.abs() < 1e-3)
    True
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise PrunusError(f"A torch.optim.Optimizer can be wrapped; this is a {type(optimizer).__name__}.")
        if isinstance(optimizer, ExtrapolationFromThePast):
            raise PrunusError("This optimizer extrapolates already: wrap it once.")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise PrunusError("LBFGS evaluates its own points, so it cannot extrapolate from the past.")
        # Not Optimizer.__init__, which would make groups and state of its own; this sets up what hooks need.
        super().__setstate__({"optimizer": optimizer, "_is_settled": False})

    optimizer: Optimizer
    _is_settled: bool

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, with the settled point of each parameter under "settled"."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Go back to x_t, update it with the gradient taken at the extrapolated point, extrapolate again.

        Args:
            closure: evaluated once, at the extrapolated point, before anything moves.

        Returns:
            What the closure returned.
        """
        self._refuse_settled("take a step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        known = self._points()
        parameters = [p for g in self.param_groups for p in g["params"] if p.grad is not None or p in known]
        if not parameters:
            self.optimizer.step()
            return loss
        points = [known[p] if p in known else p.detach().clone() for p in parameters]
        torch._foreach_copy_(parameters, points)
        self.optimizer.step()
        moved = torch._foreach_sub(parameters, points)
        torch._foreach_copy_(points, parameters)
        torch._foreach_add_(parameters, moved)
        for parameter, point in zip(parameters, points, strict=True):
            self.state[parameter][_KEY] = point
        return loss

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Have x_t in the parameters, to evaluate or to deploy; the extrapolated point comes back afterwards, exactly.

        Changes made to the parameters inside become part of x_t.

        >>> x = torch.tensor([1.0], requires_grad=True)
        >>> optimizer = ExtrapolationFromThePast(torch.optim.SGD([x], lr=0.1))
        >>> (x**2 / 2).sum().backward()
        >>> optimizer.step()
        >>> with optimizer.settled():
        ...     x.data
        tensor([0.9000])
        >>> x.data
        tensor([0.8000])
        """
        if self._is_settled:
            yield
            return
        self._swap()
        self._is_settled = True
        try:
            yield
        finally:
            self._is_settled = False
            self._swap()

    def settle(self) -> None:
        """Go back to x_t for good, and forget the past.

        >>> x = torch.tensor([1.0], requires_grad=True)
        >>> optimizer = ExtrapolationFromThePast(torch.optim.SGD([x], lr=0.1))
        >>> (x**2 / 2).sum().backward()
        >>> optimizer.step()
        >>> optimizer.settle()
        >>> x.data
        tensor([0.9000])
        """
        self._refuse_settled("settle")
        self._swap()
        self.forget()

    def forget(self) -> None:
        """Forget the past: what the parameters hold now becomes x_t, as after loading weights by hand."""
        self._refuse_settled("forget its past")
        for parameter in self._points():
            del self.state[parameter][_KEY]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the wrapped optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, with x_t in it; save the model's weights beside it, extrapolated as they are."""
        self._refuse_settled("be saved")
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, x_t included."""
        self._refuse_settled("be loaded")
        self.optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "_is_settled": self._is_settled}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def _points(self) -> dict[Tensor, Tensor]:
        """The settled point of each parameter that has moved."""
        state = self.state
        members = (p for group in self.param_groups for p in group["params"])
        return {p: state[p][_KEY] for p in members if p in state and _KEY in state[p]}

    @torch.no_grad()
    def _swap(self) -> None:
        points = self._points()
        if points:
            parameters, others = list(points), list(points.values())
            held = [p.detach().clone() for p in parameters]
            torch._foreach_copy_(parameters, others)
            torch._foreach_copy_(others, held)

    def _refuse_settled(self, what: str) -> None:
        if self._is_settled:
            raise PrunusError(f"This optimizer cannot {what} inside `settled()`: leave the block first.")
