"""hydra: one large language model across two modest GPUs in two boxes."""

__version__ = "0.1.0"
