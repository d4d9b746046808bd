"""The command line.

Read in this order: `app` (the commands and their options), `job` (what a run is asked to do), `sources` (models by
name), `folder` (what may lie in a run's folder), `train` and its neighbours, `tables` (what is shown).

`app` imports neither torch nor anything that does, so that help is there at once.
"""

from prunus.cli.app import app, main

__all__ = ["app", "main"]
