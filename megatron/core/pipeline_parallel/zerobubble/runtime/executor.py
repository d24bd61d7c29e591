"""Runs one rank's program. It decides nothing: order, peers and splits are all in the program."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from megatron.core.pipeline_parallel.zerobubble.runtime.channels import Channels
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import (
    ForwardStep,
    LossRecord,
    LossScaling,
    StageCompute,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.dataflow import Value
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import Instruction, Op
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.communication import (
    Message,
    RankProgram,
    Step,
)


@dataclass
class StepTimes:
    """Host seconds of one iteration on this rank, by what they were spent on."""

    compute: dict[Op, float] = field(default_factory=dict)
    waiting: float = 0.0  # for a value of another rank
    communication: float = 0.0  # posting sends and receives, waiting for the last to leave
    executed: list[Executed] = field(default_factory=list)  # in order


class Executed(NamedTuple):
    """One instruction as it ran, in seconds of this host's monotonic clock."""

    instruction: Instruction
    start: float
    end: float
    void: bool = False  # on weights of a wrong optimizer step; run again since


class Validation(Protocol):
    """The check of the last optimizer step, which a PV of the program makes.

    `verdict` turns what the next rank sent (None on the last rank) into what is right, and is
    passed on at once; `settle` then says whether this rank's step was right, after it has put
    right a step that was not. All ranks of a pipeline say the same.
    """

    def verdict(self, received: torch.Tensor | None) -> torch.Tensor: ...

    def settle(self, verdict: torch.Tensor) -> bool: ...


@dataclass(kw_only=True)
class Iteration:
    """What one run of a program needs besides the program."""

    forward_step: ForwardStep
    data_iterators: dict[int, Iterator[Any] | None]  # by stage
    num_microbatches: int
    scaling: LossScaling
    forward_only: bool
    collect_non_loss_data: bool = False
    on_gradients_ready: Callable[[int], None] | None = None  # a stage's last W has run
    on_losses: Callable[[list[LossRecord]], None] | None = None  # the last stage's last F has run
    validation: Validation | None = None  # of a program with a PV


class Executor:
    """Executes a `RankProgram` on this rank's stages, once."""

    def __init__(
        self,
        stages: dict[int, StageCompute],
        channels: Channels,
        iteration: Iteration,
        times: StepTimes | None = None,
    ) -> None:
        self._stages, self._channels, self._iteration = stages, channels, iteration
        self._values: dict[Value, torch.Tensor | None] = {}
        self._handlers = {
            Op.F: self._forward,
            Op.B: self._input_backward,
            Op.W: self._weight_backward,
            Op.BW: self._full_backward,
            Op.AR: self._reduce,
            Op.PV: self._validate,
        }
        self._sending: tuple[Message, ...] = ()  # what the running instruction is to send
        self._sent_for = 0.0  # seconds that sending took within it
        # Ranges for the profiler cost as much as the rest of the loop, asking for it a tenth.
        self._profiled = torch.autograd._profiler_enabled()
        self.losses: list[LossRecord] = []
        self.times = times or StepTimes()
        self._step_was_right = True  # as far as a PV has told

    def run(self, program: RankProgram) -> bool:
        """Run every step; at the end nothing is left in buffers, stores or channels.

        False if the program's PV found the last optimizer step wrong: the program has ended there,
        and what it did is void. An error carries the window of instructions it happened in.
        """
        for index, step in enumerate(program.steps):
            try:
                self._run_step(step)
            except Exception as error:
                error.add_note(_where(program, index))
                raise
            if not self._step_was_right:
                ran = self.times.executed
                ran[:] = [item._replace(void=not item.instruction.op.is_mark) for item in ran]
                return False
        start = time.perf_counter()
        self._channels.finish()
        self.times.communication += time.perf_counter() - start
        assert not self._values, f"made and never used: {list(map(str, self._values))}"
        for stage in self._stages.values():
            stage.assert_empty()
        return True

    def _run_step(self, step: Step) -> None:
        clock = time.perf_counter
        start = clock()
        for message in step.post:
            self._channels.post_receive(message)
        posted = clock()
        for message in step.waits:
            self._put(message.value, self._channels.wait_receive(message))
        for message in step.arrived:
            self._channels.release(message)
        ready = clock()
        self._sending = step.sends
        self._sent_for = 0.0
        instruction = step.instruction
        if self._profiled:
            # A name that begins with a digit would lose it in the profiler's tables.
            with torch.profiler.record_function(f"pipeline {instruction}"):
                self._handlers[instruction.op](instruction)
        else:
            self._handlers[instruction.op](instruction)
        done = clock()
        op, times = instruction.op, self.times
        times.executed.append(Executed(instruction, ready, done))
        times.waiting += ready - posted
        times.compute[op] = times.compute.get(op, 0.0) + done - ready - self._sent_for
        times.communication += clock() - done + posted - start + self._sent_for

    def _hand_on(self, value: Value, tensor: torch.Tensor) -> None:
        """Send a value that was just made to the ranks that need it, or keep it for this one."""
        if not self._sending:
            self._put(value, tensor)
            return
        start = time.perf_counter()
        for message in self._sending:
            assert message.value == value, f"{value} was made where {message.value} was due"
            self._channels.send(message, tensor)
        self._sent_for = time.perf_counter() - start

    def _put(self, value: Value, tensor: torch.Tensor | None) -> None:
        assert value not in self._values, f"{value} is made twice"
        self._values[value] = tensor

    def _take(self, value: Value) -> torch.Tensor:
        tensor = self._values.pop(value)
        assert tensor is not None, f"{value} has no tensor"
        return tensor

    def _forward(self, instruction: Instruction) -> None:
        _, index, microbatch = instruction
        stage = self._stages[index]
        received = None
        if not stage.context.is_first:
            received = self._take(Value("act", index - 1, microbatch))
        iteration = self._iteration
        record = stage.forward(
            microbatch,
            received,
            forward_step=iteration.forward_step,
            data_iterator=iteration.data_iterators[index],
            scaling=iteration.scaling,
            forward_only=iteration.forward_only,
            hand_on=lambda output: self._hand_on(Value("act", index, microbatch), output),
            collect_non_loss_data=iteration.collect_non_loss_data,
        )
        if record is not None:
            self.losses.append(record)
            if len(self.losses) == iteration.num_microbatches and iteration.on_losses is not None:
                iteration.on_losses(self.losses)

    def _output_grad(self, instruction: Instruction) -> torch.Tensor | None:
        _, index, microbatch = instruction
        if self._stages[index].context.is_last:
            return None
        return self._take(Value("grad", index + 1, microbatch))

    def _input_backward(self, instruction: Instruction) -> None:
        stage = self._stages[instruction.stage]
        stage.input_backward(
            instruction.microbatch,
            self._output_grad(instruction),
            hand_on=lambda grad: self._hand_on(Value("grad", *instruction[1:]), grad),
        )

    def _weight_backward(self, instruction: Instruction) -> None:
        self._stages[instruction.stage].weight_backward(instruction.microbatch)

    def _full_backward(self, instruction: Instruction) -> None:
        stage = self._stages[instruction.stage]
        stage.full_backward(
            instruction.microbatch,
            self._output_grad(instruction),
            hand_on=lambda grad: self._hand_on(Value("grad", *instruction[1:]), grad),
        )

    def _reduce(self, instruction: Instruction) -> None:
        if self._iteration.on_gradients_ready is not None:
            self._iteration.on_gradients_ready(instruction.stage)

    def _validate(self, instruction: Instruction) -> None:
        validation = self._iteration.validation
        assert validation is not None, f"{instruction} without an optimizer step to validate"
        received = [value for value in self._values if value.kind == "verdict"]
        verdict = validation.verdict(self._take(received[0]) if received else None)
        if self._sending:  # before what a wrong step takes to put right
            self._hand_on(Value("verdict", *instruction[1:]), verdict)
        self._step_was_right = validation.settle(verdict)


def _where(program: RankProgram, index: int, around: int = 3) -> str:
    """`at step 1: 2F0 [2BW0] 2F1`: the instruction that failed and its neighbours."""
    steps: Sequence[Step] = program.steps
    first = max(0, index - around)
    window = (
        f"[{step.instruction}]" if first + offset == index else str(step.instruction)
        for offset, step in enumerate(steps[first : index + around + 1])
    )
    return f"rank {program.rank} at step {index}: " + " ".join(window)
