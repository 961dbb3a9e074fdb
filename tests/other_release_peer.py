"""A peer that says it is of another release: what a box looks like that was updated alone."""

from __future__ import annotations

import sys

import hydra
from hydra.peer.launch import main

if __name__ == "__main__":
    hydra.__version__ = "9.9.9"
    sys.exit(main(sys.argv[1:]))
