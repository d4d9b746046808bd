"""Data: built in, fetched and checked, or the user's own; and minibatches of it."""

from prunus.data.batches import Batches
from prunus.data.fetch import get
from prunus.data.sets import NAMES, Dataset, check, load

__all__ = ["NAMES", "Batches", "Dataset", "check", "get", "load"]
