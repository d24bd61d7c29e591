"""Flags of the zero-bubble fork (arXiv:2401.10241, arXiv:2405.15362)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.training.cli import ArgumentGroup, arg


def count_or_auto(text: str) -> str:
    """`auto` or a number of at least 1; kept as text, as the fork does."""
    try:
        valid = text == "auto" or 1 <= float(text) < math.inf
    except ValueError:
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of at least 1 nor auto")
    return text


@dataclass(frozen=True, kw_only=True)
class ZeroBubbleArguments(ArgumentGroup):
    """Zero-bubble schedules: the fork's flags."""

    enable_zero_bubble: bool = arg(False, "Same as --pipeline-schedule zb.")
    zero_bubble_v_schedule: bool = arg(
        False,
        "Same as --pipeline-schedule zb-v, v-half or v-min, by --zero-bubble-v-schedule-mem-setup.",
    )
    zero_bubble_v_schedule_mem_setup: Literal["zb", "half", "min"] = arg(
        "zb", "Activation memory of the V schedule: that of 1F1B, a half, or a third of it."
    )
    enable_1f1b_v: bool = arg(
        False, "Same as --pipeline-schedule 1f1b-v.", flags=("--enable-1f1b-v",)
    )
    zero_bubble_max_pending_backward: str = arg(
        "auto",
        "Micro-batches in flight that the search may use on a rank. For zb: the pipeline size "
        "for ZB-1p, twice that for ZB-2p, or auto to fill the memory. zb-v, v-half and v-min can "
        "only be given less than they take by themselves, 1.5 for one and a half (a rank's two "
        "chunks count a half each).",
        parse=count_or_auto,
        metavar="N|auto",
    )
    zero_bubble_adaptive_memory_limit_percentile: int = arg(
        85, "Percentage of device memory that auto may fill.", at_least=1, at_most=100
    )
    zero_bubble_pipeline_timers_start_iter: int = arg(
        100, "First profiled iteration (1-based).", at_least=1
    )
    zero_bubble_pipeline_timers_end_iter: int = arg(
        110, "Last profiled iteration (1-based); the schedule is planned anew after it.", at_least=1
    )
    enable_optimizer_post_validation: bool = arg(
        False,
        "Step the optimizer before the global gradient norm is known, so that pipeline ranks need "
        "not meet; a wrong step is rolled back exactly. On by default for schedules that split the "
        "backward; this flag turns it on for the others too.",
    )
    disable_optimizer_post_validation: bool = arg(
        False, "Let pipeline ranks meet at every optimizer step, whatever the schedule."
    )
    interleave_group_size: int = arg(0, "Grouped interleaved schedule; 0 is off.", at_least=0)
    num_seq_splits: int = arg(1, "Pipeline units that a sequence is cut into.", at_least=1)
    cpu_offload: bool = arg(False, "Keep activations of pipeline chunks in host memory.")

    @property
    def schedule(self) -> tuple[str, str] | None:
        """The schedule that these flags ask for and the flag that does, or None."""
        if self.enable_1f1b_v:
            return "1f1b-v", "--enable-1f1b-v"
        if self.zero_bubble_v_schedule:
            names = {"zb": "zb-v", "half": "v-half", "min": "v-min"}
            return names[self.zero_bubble_v_schedule_mem_setup], "--zero-bubble-v-schedule"
        if self.enable_zero_bubble:
            return "zb", "--enable-zero-bubble"
        return None

    def problems(self) -> Iterator[str]:
        """Schedules that exclude each other; a profile window that exists."""
        if self.enable_1f1b_v and (self.enable_zero_bubble or self.zero_bubble_v_schedule):
            other = (
                "--enable-zero-bubble" if self.enable_zero_bubble else "--zero-bubble-v-schedule"
            )
            yield f"--enable-1f1b-v does not split the backward and excludes {other}; give one"
        if self.enable_1f1b_v and self.enable_optimizer_post_validation:
            yield "--enable-1f1b-v excludes --enable-optimizer-post-validation; drop one"
        if self.enable_optimizer_post_validation and self.disable_optimizer_post_validation:
            yield (
                "--enable-optimizer-post-validation and --disable-optimizer-post-validation "
                "exclude each other; give one"
            )
        start = self.zero_bubble_pipeline_timers_start_iter
        end = self.zero_bubble_pipeline_timers_end_iter
        if start > end:
            yield (
                f"--zero-bubble-pipeline-timers-start-iter {start} is after "
                f"--zero-bubble-pipeline-timers-end-iter {end}; profiling would never run"
            )
