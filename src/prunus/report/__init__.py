"""Reports: what a run recorded, as one page a person can open, print and pass on.

Read in this order: `runs` (what is read), `plots` (what is drawn), `page` (what is said), `files` (how it is written).
"""

from prunus.report.files import write

__all__ = ["write"]
