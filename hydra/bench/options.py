"""Options that several benchmarks share. Loads nothing: every start of the command line reads it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

# Head and peer are on this box, and llama.cpp's CPU threads spin: with all cores each, both would measure the
# scheduler.
HALF_OF_THE_CORES = max(1, len(os.sched_getaffinity(0)) // 2)

Threads = Annotated[
    int,
    typer.Option("--threads", "-t", metavar="N", min=1, show_default="half of the cores",
                 help="CPU threads of peer and head each."),
]
