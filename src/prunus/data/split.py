"""One split into training and test samples, the same on every machine and in every version."""

import numpy as np
from numpy.typing import NDArray


def stratified(labels: NDArray[np.integer], test: float = 0.2, seed: int = 0) -> tuple[NDArray[np.int64], ...]:
    """Split so that each class gives the same part, rounded, to the test set.

    Returns:
        The indices of the training samples and those of the test samples, ascending.

    >>> [part.tolist() for part in stratified(np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1]))]
    [[0, 1, 3, 4, 6, 7, 8, 9], [2, 5]]
    """
    # RandomState and not Generator: numpy promises that only the former's stream never changes.
    random = np.random.RandomState(seed)
    held_out = []
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        held_out.append(members[: round(test * len(members))])
    tested = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), tested), tested
