"""Plans written by hand for the tests of render/, with what is known about them."""

from __future__ import annotations

from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan

# 1F1B on two ranks: unit times give makespan (m + p - 1) * 3 = 9, work 6, so bubble rate 1/3.
ONE_F_ONE_B = Plan.from_text(
    """
    schedule: by-hand
    microbatches: 2
    placement: 0.0 1.0
    rank 0: 0F0 0F1 0BW0 0BW1
    rank 1: 1F0 1BW0 1F1 1BW1
    """
)

# A V on two ranks with split backward. With unit times and free transfers, in slots of one chunk
# operation (half a unit); capitals are chunk 0, small letters chunk 1:
#
#   slot    0   1   2   3   4   5   6   7   8   9  10  11  12  13
#   rank 0  F0  F1  .   f0  b0  w0  f1  b1  w1  B0  W0  .   B1  W1
#   rank 1  .   F0  f0  F1  f1  b0  w0  B0  W0  b1  w1  B1  W1  .
#
# Makespan and longest span are 14 slots = 7 units, the work is 6 units: bubble rate 1/7.
V_SPLIT = Plan.from_text(
    """
    schedule: v-by-hand
    microbatches: 2
    placement: 0.0 1.0 1.1 0.1
    rank 0: 0F0 0F1 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 0B1 0W1
    rank 1: 1F0 2F0 1F1 2F1 2B0 2W0 1B0 1W0 2B1 2W1 1B1 1W1
    """
)
