"""Training with `megatron.core`: command line, start-up, loop, checkpoints, logs.

Names are imported when first used, so that tools which need only a part start fast.
"""

import importlib
from typing import Any

_HOME = {
    "get_adlr_autoresume": "global_vars",
    "get_args": "global_vars",
    "get_model": "model_setup",
    "get_one_logger": "global_vars",
    "get_session": "global_vars",
    "get_signal_handler": "global_vars",
    "get_tensorboard_writer": "global_vars",
    "get_timers": "global_vars",
    "get_tokenizer": "global_vars",
    "get_wandb_writer": "global_vars",
    "initialize_megatron": "initialize",
    "is_last_rank": "printing",
    "pretrain": "training",
    "print_rank_0": "printing",
    "print_rank_last": "printing",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
