import pytest
import torch

from prunus.data import Batches
from prunus.errors import DataError

X, Y = torch.arange(10.0).unsqueeze(1), torch.arange(10)


def orders(batches: Batches, epochs: int = 1) -> list[list[int]]:
    return [y.tolist() for _ in range(epochs) for _, y in batches]


@pytest.mark.parametrize("size, drop_last, sizes", [(4, False, [4, 4, 2]), (4, True, [4, 4]), (5, True, [5, 5])])
def test_an_epoch_visits_each_sample_once(size: int, drop_last: bool, sizes: list[int]) -> None:
    batches = Batches(X, Y, size, drop_last=drop_last)
    drawn = list(batches)
    assert [len(y) for _, y in drawn] == sizes
    assert len(batches) == len(sizes)
    seen = torch.cat([y for _, y in drawn])
    assert len(seen.unique()) == sum(sizes)
    assert all(torch.equal(x.squeeze(1), y.float()) for x, y in drawn)


def test_a_batch_may_be_larger_than_the_data() -> None:
    assert [len(y) for _, y in Batches(X, Y, 99)] == [10]


def test_the_order_follows_the_seed_and_changes_by_the_epoch() -> None:
    first = orders(Batches(X, Y, 5, seed=3), 3)
    assert first == orders(Batches(X, Y, 5, seed=3), 3)
    assert first == orders(Batches(X, Y, 5, generator=torch.Generator().manual_seed(3)), 3)
    assert first != orders(Batches(X, Y, 5, seed=4), 3)
    assert first[:2] != first[2:4]


def test_the_order_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    orders(Batches(X, Y, 5))
    assert torch.equal(before, torch.get_rng_state())


def test_a_restored_state_goes_on_exactly() -> None:
    run = Batches(X, Y, 3, seed=1)
    orders(run, 2)
    state = run.state_dict()
    rest = orders(run, 2)
    resumed = Batches(X, Y, 3, seed=99)
    resumed.load_state_dict(state)
    assert orders(resumed, 2) == rest


def test_a_state_taken_within_an_epoch_is_of_its_start() -> None:
    run = Batches(X, Y, 3, seed=1)
    orders(run)
    drawn, states = [], []
    for _, y in run:
        drawn.append(y.tolist())
        states.append(run.state_dict())
    following = orders(run)
    for state in states:  # the last batch's too: the loop had not ended
        resumed = Batches(X, Y, 3)
        resumed.load_state_dict(state)
        assert orders(resumed, 2) == drawn + following


def test_a_state_is_not_changed_by_going_on() -> None:
    run = Batches(X, Y, 3)
    next(iter(run))
    state = run.state_dict()
    before = state["generator"].clone()
    orders(run, 2)
    assert torch.equal(state["generator"], before)


def test_an_epoch_left_early_is_followed_by_a_new_one() -> None:
    run = Batches(X, Y, 3, seed=1)
    next(iter(run))
    start = run.generator.get_state()
    next(iter(run))
    assert torch.equal(run.state_dict()["generator"], start)


@pytest.mark.gpu
def test_the_order_is_the_same_on_every_device() -> None:
    here, there = Batches(X, Y, 3, seed=1), Batches(X.cuda(), Y.cuda(), 3, seed=1)
    assert orders(here, 2) == orders(there, 2)
    assert next(iter(there))[0].is_cuda


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"batch_size": 0}, "batch size is 0"),
        ({"batch_size": -3}, "batch size is -3"),
        ({"batch_size": 2.5}, "batch size is 2.5, where a whole number"),
        ({"batch_size": 11, "drop_last": True}, "batch size is 11 but there are 10 samples"),
        ({"y": Y[:9]}, "10 inputs but 9 labels"),
        ({"x": X[:0], "y": Y[:0]}, "no samples"),
        ({"y": Y.to("meta")}, "inputs are on cpu but the labels on meta"),
    ],
)
def test_what_makes_no_batches_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Batches(**({"x": X, "y": Y, "batch_size": 2} | settings))


def test_a_state_that_does_not_fit_is_refused() -> None:
    batches = Batches(X, Y, 2)
    state = batches.state_dict()
    with pytest.raises(DataError, match="lacks generator"):
        batches.load_state_dict({"samples": torch.tensor(10)})
    with pytest.raises(DataError, match="of 9 samples, but there are 10"):
        batches.load_state_dict(state | {"samples": torch.tensor(9)})
    with pytest.raises(DataError, match="cannot be restored"):
        batches.load_state_dict(state | {"generator": torch.zeros(3, dtype=torch.uint8)})
