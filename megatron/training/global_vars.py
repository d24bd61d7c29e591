"""Megatron's getters (`get_args`, `get_tokenizer`, ...) over this process's one `Session`.

They are for users' scripts; our own code is given what it needs. The module-level holder is the
price of Megatron's interface.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.timers import Timers
from megatron.training.session import Session

_held: list[Session] = []  # empty, or the one session of this process


def hold_session(session: Session) -> None:
    """Let the getters below answer from `session`."""
    _held[:] = [session]


def destroy_global_vars() -> None:
    _held.clear()


def get_session() -> Session:
    if not _held:
        raise RuntimeError("Megatron is not initialised; call initialize_megatron first")
    return _held[0]


def get_args() -> argparse.Namespace:
    return get_session().namespace


def get_tokenizer() -> Any:
    return get_session().tokenizer


def get_timers() -> Timers:
    return get_session().timers


def get_tensorboard_writer() -> Any:
    """The TensorBoard writer of this rank, or None."""
    return getattr(get_session(), "tensorboard_writer", None)


def get_wandb_writer() -> Any:
    """The wandb module of this rank, or None."""
    return getattr(get_session(), "wandb_writer", None)


def get_signal_handler() -> Any:
    return getattr(get_session(), "signal_handler", None)


def get_one_logger() -> None:
    """There is no off-site logger here; Megatron scripts test the result for None."""


def get_adlr_autoresume() -> None:
    """There is no cluster-specific resume here; Megatron scripts test the result for None."""
