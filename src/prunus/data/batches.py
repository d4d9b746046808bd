"""Minibatches straight from tensors that lie on the device."""

import operator
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from prunus.errors import DataError


class Batches:
    """Minibatches in a new random order each epoch, an epoch being one `for` over this object.

    The order is drawn from a CPU generator, so it is the same whatever device the tensors are on. Gathering is one
    `index_select` a batch.

    The state is the generator's at the start of the epoch under way, or of the next one once an epoch has run to its
    end. To go on in the middle of an epoch, load it and skip the batches that were done.

    Args:
        x: The inputs; the first dimension counts the samples.
        y: As many labels, on the same device.
        batch_size: How many samples a batch holds; the last one of an epoch may hold fewer.
        seed: Where the orders begin, unless `generator` is given.
        generator: A CPU generator to draw from, shared with its owner.
        drop_last: Leave out a last batch that would be smaller.

    >>> x = torch.arange(5.0).unsqueeze(1)
    >>> batches = Batches(x, torch.arange(5), batch_size=2, seed=0)
    >>> len(batches), [len(y) for _, y in batches]
    (3, [2, 2, 1])
    >>> state = batches.state_dict()
    >>> next_epoch = [y.tolist() for _, y in batches]
    >>> batches.load_state_dict(state)
    >>> [y.tolist() for _, y in batches] == next_epoch
    True
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        *,
        seed: int = 0,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
    ) -> None:
        try:
            size = operator.index(batch_size)
        except TypeError:
            raise DataError(f"The batch size is {batch_size!r}, where a whole number from 1 is needed.") from None
        if size < 1:
            raise DataError(f"The batch size is {size}, where a whole number from 1 is needed.")
        if len(x) != len(y):
            raise DataError(f"There are {len(x)} inputs but {len(y)} labels to make batches of; they must agree.")
        if len(x) == 0:
            raise DataError("There are no samples to make batches of.")
        if x.device != y.device:
            raise DataError(f"The inputs are on {x.device} but the labels on {y.device}; put both on one device.")
        if drop_last and size > len(x):
            raise DataError(
                f"The batch size is {size} but there are {len(x)} samples, so leaving out the last, smaller batch "
                "leaves none; choose a smaller batch size."
            )
        if generator is not None and generator.device.type != "cpu":
            raise DataError(f"The generator is on {generator.device}, where one on the CPU is needed.")
        self.x, self.y, self.batch_size, self.drop_last = x, y, size, drop_last
        self.generator = generator if generator is not None else torch.Generator().manual_seed(seed)
        self._epoch_start: Tensor | None = None  # the generator's state, while an epoch is under way

    def __len__(self) -> int:
        return len(self.x) // self.batch_size if self.drop_last else -(-len(self.x) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start = self.generator.get_state()
        self._epoch_start = start
        order = torch.randperm(len(self.x), generator=self.generator).to(self.x.device)
        for number in range(len(self)):
            chosen = order[number * self.batch_size : (number + 1) * self.batch_size]
            yield self.x.index_select(0, chosen), self.y.index_select(0, chosen)
        # Only now, past the last batch: a checkpoint taken inside the loop belongs to this epoch.
        if self._epoch_start is start:
            self._epoch_start = None

    def state_dict(self) -> dict[str, Tensor]:
        """Give what `load_state_dict` needs, in the same or another process, to draw the same orders again."""
        state = self.generator.get_state() if self._epoch_start is None else self._epoch_start.clone()
        return {"generator": state, "samples": torch.tensor(len(self.x))}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state that `state_dict` gave, at the start of an epoch."""
        missing = [key for key in ("generator", "samples") if not isinstance(state.get(key), Tensor)]
        if missing:
            raise DataError(
                f"The state of the batches lacks {' and '.join(missing)}; it is not of `state_dict`'s make."
            )
        if int(state["samples"]) != len(self.x):
            raise DataError(
                f"The state of the batches is of {int(state['samples'])} samples, but there are {len(self.x)} here; go "
                "on with the data that the run began with."
            )
        try:
            self.generator.set_state(state["generator"].cpu())
        except (RuntimeError, TypeError) as error:
            raise DataError(f"The state of the batches cannot be restored: {str(error).splitlines()[0]}.") from error
        self._epoch_start = None
