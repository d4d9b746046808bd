"""Surgery: from a Keep to a plain, smaller, equal model. Nothing here knows of gates."""

from prunus.surgery.slicing import SelectedLinear, mask_consumers, slice_model
from prunus.surgery.trial import Inputs
from prunus.surgery.verify import check, prove

__all__ = ["Inputs", "SelectedLinear", "check", "mask_consumers", "prove", "slice_model"]
