"""`python -m hydra` is the `hydra` program."""

from .cli import main

main()
