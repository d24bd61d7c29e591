"""What instructions cost: time and memory per stage, the same for planners, simulator and tools.

Times may be in any one unit (the runtime uses microseconds), memory in any one unit (the runtime
uses bytes; the tools use "activations of one micro-batch through all layers of one rank").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .instruction import Instruction, Op, ScheduleError
from .placement import Placement


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one micro-batch, one entry per stage in model order.

    Memory of a stage and micro-batch: `held_f_to_b` from the start of its F to the end of its B,
    then `held_b_to_w` to the end of its W. BW releases everything at its end.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer: float  # one message between two ranks; within a rank a hand-over takes no time
    held_f_to_b: tuple[float, ...]
    held_b_to_w: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = {len(values) for values in self._per_stage().values()}
        if len(lengths) != 1:
            raise ScheduleError(f"costs are given for different numbers of stages: {lengths}")
        for name, values in {**self._per_stage(), "transfer": (self.transfer,)}.items():
            for value in values:
                if not (math.isfinite(value) and value >= 0):
                    raise ScheduleError(
                        f"cost {name} has {value}; costs are finite and not below 0"
                    )
        if min(self.forward, default=0) <= 0:
            raise ScheduleError(f"cost forward has {min(self.forward)}; a forward takes time")

    @classmethod
    def uniform(
        cls,
        placement: Placement,
        *,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        transfer: float = 0.0,
        held_f_to_b: float = 1.0,
        held_b_to_w: float = 1.0,
    ) -> Costs:
        """Equal ranks: the figures are for all chunks of one rank, a chunk takes its share."""
        chunks = [len(placement.stages_by_rank[slot.rank]) for slot in placement.slots]

        def share(value: float) -> tuple[float, ...]:
            return tuple(value / n for n in chunks)

        return cls(
            forward=share(forward),
            input_grad=share(input_grad),
            weight_grad=share(weight_grad),
            transfer=transfer,
            held_f_to_b=share(held_f_to_b),
            held_b_to_w=share(held_b_to_w),
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    def of(self, instruction: Instruction) -> float:
        """Time of one instruction."""
        op, stage, _ = instruction
        if op is Op.F:
            return self.forward[stage]
        if op is Op.B:
            return self.input_grad[stage]
        if op is Op.W:
            return self.weight_grad[stage]
        if op.is_mark:
            return 0.0
        return self.input_grad[stage] + self.weight_grad[stage]

    def work_of(self, stages: Sequence[int], num_microbatches: int) -> float:
        """Time a rank holding `stages` computes in one iteration."""
        each = sum(self.forward[s] + self.input_grad[s] + self.weight_grad[s] for s in stages)
        return each * num_microbatches

    def memory_at_start(self, instruction: Instruction) -> float:
        """Memory taken when the instruction starts."""
        return self.held_f_to_b[instruction.stage] if instruction.op is Op.F else 0.0

    def memory_at_end(self, instruction: Instruction) -> float:
        """Change of memory when the instruction ends (mostly a release, so below 0)."""
        op, stage, _ = instruction
        if op is Op.F or op.is_mark:
            return 0.0
        if op is Op.B:
            return self.held_b_to_w[stage] - self.held_f_to_b[stage]
        return -self.held_b_to_w[stage] if op is Op.W else -self.held_f_to_b[stage]

    def _per_stage(self) -> dict[str, tuple[float, ...]]:
        return {
            "forward": self.forward,
            "input_grad": self.input_grad,
            "weight_grad": self.weight_grad,
            "held_f_to_b": self.held_f_to_b,
            "held_b_to_w": self.held_b_to_w,
        }
