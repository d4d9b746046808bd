"""Surgery: from a Keep to a plain, smaller, equal model. Nothing here knows of gates."""

from prunus.surgery.exported import Exported
from prunus.surgery.program import Program
from prunus.surgery.slicing import SelectedLinear, mask_sites, slice_model
from prunus.surgery.trial import Inputs, first_run, outputs
from prunus.surgery.verify import check, holds, prove

__all__ = [
    "Exported",
    "Inputs",
    "Program",
    "SelectedLinear",
    "check",
    "first_run",
    "holds",
    "mask_sites",
    "outputs",
    "prove",
    "slice_model",
]
