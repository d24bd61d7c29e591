"""Megatron-shaped core library: models, parallelism, pipeline schedules, datasets, optimizers."""

__version__ = "0.1.0"
