"""ZB-H1 and ZB-H2: the hand-made zero-bubble schedules (arXiv:2401.10241, section 2.3), plain.

A rank's program is read off three shifted rows; in round x it runs F(x), B(x - lag), W(x - delay),
as far as these micro-batches exist. On p = 4 ranks, ZB-H1:

    rank 0: F F F F B W F B W ...        lag 3, delay 3
    rank 3: F B F B F B F B W F B W ...  lag 0, delay 3: W is held back, so that every rank keeps
                                         p micro-batches and B reaches the ranks above sooner

ZB-H2 has twice the lag and the delay. For T_W <= T_F the bubbles are:

    ZB-H1, m >= p         (p-1)(T_F + T_B - T_W), in the longest span and in the makespan
    ZB-H2, m >= 2p-1      (p-1)(T_F + T_B - 2 T_W), or none if that is negative, in the span;
                          the makespan gains nothing over H1 for equal times
    either, m <= p        the longest span is (m+p-1)(T_F + T_B) + T_W

Peak memory in micro-batches, on every rank: min(m, p) for H1, min(m, 2p-1) for H2.
"""

from __future__ import annotations

from ..instruction import Instruction, Op
from ..memory import within_limits
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest


def plan_zb_h1(request: PlanRequest) -> Plan:
    """As many warm-up forwards as 1F1B; W fills the bubbles of the cool-down."""
    return _plan("zb-h1", request, hold=1)


def plan_zb_h2(request: PlanRequest) -> Plan:
    """Twice the warm-up forwards, which fill the bubble before the first B as well."""
    return _plan("zb-h2", request, hold=2)


def _plan(name: str, request: PlanRequest, hold: int) -> Plan:
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    delay = hold * (num_ranks - 1)
    programs = []
    for rank in range(num_ranks):
        lag = hold * (num_ranks - 1 - rank)
        rows = ((Op.F, 0), (Op.B, lag), (Op.W, delay))
        programs.append(
            [
                Instruction(op, rank, x - shift)
                for x in range(num_microbatches + delay)
                for op, shift in rows
                if 0 <= x - shift < num_microbatches
            ]
        )
    plan = Plan.of(name, Placement.plain(num_ranks), num_microbatches, programs)
    return within_limits(plan, request)
