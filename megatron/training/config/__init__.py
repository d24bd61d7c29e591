"""Configuration of a run: typed groups of flags, and `RunConfig`, which holds them."""

from megatron.training.cli import ConfigError

from .flat import flat_namespace
from .run_config import GROUPS, RunConfig

__all__ = ["GROUPS", "ConfigError", "RunConfig", "flat_namespace"]
