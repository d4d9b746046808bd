"""Surgery: from a Keep to a plain, smaller, equal model. Nothing here knows of gates."""

from prunus.surgery.slicing import SelectedLinear, mask_consumers, slice_model
from prunus.surgery.trial import Inputs, first_run, outputs
from prunus.surgery.verify import check, prove

__all__ = ["Inputs", "SelectedLinear", "check", "first_run", "mask_consumers", "outputs", "prove", "slice_model"]
