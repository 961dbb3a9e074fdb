"""Options that several benchmarks share. Loads nothing heavy: every start of the command line reads it."""

from __future__ import annotations

from typing import Annotated

import typer

from hydra.hardware import usable_cores

# Head and peer are on this box, and llama.cpp's CPU threads spin: with all cores each, both would measure the
# scheduler.
HALF_OF_THE_CORES = max(1, usable_cores() // 2)

Threads = Annotated[
    int,
    typer.Option("--threads", "-t", metavar="N", min=1, show_default="half of the cores",
                 help="CPU threads of peer and head each."),
]
