"""Adds communication to a plan: `lower(plan)` says what each rank posts, awaits and sends.

The contract, for every ordered pair of ranks and kind of value (one FIFO `Channel` each):

- A value that an instruction on another rank needs is one `Message`, sent once, as soon as its
  maker has ended. A hand-over between two stages of one rank is no message.
- Messages are sent and received in one order, that of the sender's program. The k-th receive
  posted on a channel takes the k-th message sent on it, whatever order the receiver needs them in.
- Receives are posted ahead: at each step, all that the program has needed up to and including it,
  and `look_ahead` more. So a wait on a message implies that its receive and all before it on the
  channel are posted, a message finds a receive waiting for it, and the memory of posted receives is
  bounded. Posting never blocks; only the instruction that needs a message waits for it.

So a plan whose data flow is free of cycles cannot deadlock, and p = 2, where both neighbours of a
rank are one rank, needs no special case.

What may be freed when: a sent value's storage once a later message from its receiver proves that
it has arrived (`Step.arrived`; backends do not tell without being waited on), and the rest at the
end (an activation's autograd graph stays until the stage's B); a received gradient at the end of
the B that needs it; a received activation at the end of the B of the stage that took it in, apart
from what its W needs.

A program with a PV may stop there: all ranks then throw away what they did and received before
their PV, and run the program again (`RankProgram.void` says how much has to be received for that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..dataflow import Value, makes, needs, receivers
from ..instruction import Instruction, Op, ScheduleError
from ..plan import Plan


class Channel(NamedTuple):
    """A FIFO stream of messages: one direction between two ranks, one kind of value."""

    source: int
    target: int
    kind: str  # "act", "grad" or "verdict"


class Message(NamedTuple):
    """One value on its way."""

    channel: Channel
    value: Value


class Step(NamedTuple):
    """One instruction with its communication, in the order in which it happens."""

    post: tuple[Message, ...]  # receives to post, without waiting
    waits: tuple[Message, ...]  # then: messages that must have arrived
    instruction: Instruction
    sends: tuple[Message, ...]  # when it has ended: messages to send, without waiting
    arrived: tuple[Message, ...] = ()  # sent earlier; once the waits are over they have arrived


@dataclass(frozen=True)
class RankProgram:
    """What one rank executes in an iteration."""

    rank: int
    steps: tuple[Step, ...]
    channels: tuple[Channel, ...]  # that it sends or receives on, sorted
    # With a PV: how many messages each incoming channel brings that were sent before the sender's
    # PV, and are void if the optimizer step was wrong.
    void: tuple[tuple[Channel, int], ...] = ()

    @property
    def validation_step(self) -> int | None:
        """The step of the PV, if there is one."""
        ops = (step.instruction.op for step in self.steps)
        return next((index for index, op in enumerate(ops) if op is Op.PV), None)

    @property
    def num_messages_sent(self) -> int:
        return sum(len(step.sends) for step in self.steps)


def lower(plan: Plan, *, look_ahead: int = 2) -> tuple[RankProgram, ...]:
    """One program per rank, for a validated plan; linear in the number of instructions."""
    if look_ahead < 0:
        raise ScheduleError(f"look_ahead is {look_ahead}; it is a number of receives, 0 or more")
    sends = [_sends(plan, rank) for rank in range(plan.num_ranks)]
    streams: dict[Channel, list[Message]] = {}  # each channel's messages in the order sent
    for rank_sends in sends:
        for step_sends in rank_sends:
            for message in step_sends:
                streams.setdefault(message.channel, []).append(message)
    programs = [
        _rank_program(plan, rank, sends[rank], streams, look_ahead)
        for rank in range(plan.num_ranks)
    ]
    programs = [_with_void(program, programs) for program in programs]
    return tuple(_with_arrivals(program, programs) for program in programs)


def all_channels(programs: tuple[RankProgram, ...]) -> tuple[Channel, ...]:
    """Every channel of a plan in one order, the same on all ranks: for creating communicators."""
    return tuple(sorted({channel for program in programs for channel in program.channels}))


def _sends(plan: Plan, rank: int) -> list[tuple[Message, ...]]:
    """For each step of a rank, the messages it sends at its end."""
    travelling = receivers(plan.placement)
    return [
        tuple(
            Message(Channel(rank, target, value.kind), value)
            for value in makes(instruction)
            for target in travelling.get((value.kind, value.stage), ())
        )
        for instruction in plan.programs[rank]
    ]


def _rank_program(
    plan: Plan,
    rank: int,
    sends: list[tuple[Message, ...]],
    streams: dict[Channel, list[Message]],
    look_ahead: int,
) -> RankProgram:
    incoming = {channel: stream for channel, stream in streams.items() if channel.target == rank}
    index = {
        message.value: (message, k)
        for stream in incoming.values()
        for k, message in enumerate(stream)
    }
    posted = dict.fromkeys(incoming, 0)  # how many of each channel's messages
    steps = []
    for step, instruction in enumerate(plan.programs[rank]):
        waits = [index[value] for value in needs(instruction, plan.placement) if value in index]
        wanted = dict.fromkeys(incoming, look_ahead) if step == 0 else {}
        for message, k in waits:
            wanted[message.channel] = max(wanted.get(message.channel, 0), k + 1 + look_ahead)
        post: list[Message] = []
        for channel, count in wanted.items():
            post += incoming[channel][posted[channel] : count]
            posted[channel] = max(posted[channel], min(count, len(incoming[channel])))
        messages = tuple(message for message, _ in waits)
        steps.append(Step(tuple(post), messages, instruction, sends[step]))
    used = {channel for channel in streams if rank in (channel.source, channel.target)}
    return RankProgram(rank, tuple(steps), tuple(sorted(used)))


def _with_void(program: RankProgram, programs: Sequence[RankProgram]) -> RankProgram:
    """The program, told how many messages come to it from before their senders' PV."""
    if program.validation_step is None:
        return program
    counts = {
        channel: 0
        for channel in program.channels
        if channel.target == program.rank and channel.kind != "verdict"
    }
    for peer in programs:
        for step in peer.steps[: peer.validation_step]:
            for message in step.sends:
                if message.channel in counts:
                    counts[message.channel] += 1
    return replace(program, void=tuple(counts.items()))


def _with_arrivals(program: RankProgram, programs: Sequence[RankProgram]) -> RankProgram:
    """The program, its steps told which earlier messages have arrived once their waits are over.

    A message that its receiver consumes at step c has arrived before anything the receiver sends
    at step c or later; the first of that to be waited for here is the proof.
    """
    awaited_at = {m: k for k, step in enumerate(program.steps) for m in step.waits}
    arrived: dict[int, list[Message]] = {}
    for peer in {channel.target for channel in program.channels} - {program.rank}:
        theirs = programs[peer].steps
        proof: int | None = None  # the earliest step here that waits for something sent so late
        for step in reversed(theirs):
            for message in step.sends:
                if message in awaited_at:
                    at = awaited_at[message]
                    proof = at if proof is None else min(proof, at)
            if proof is not None:
                ours = [m for m in step.waits if m.channel.source == program.rank]
                arrived.setdefault(proof, []).extend(ours)
    steps = tuple(
        step._replace(arrived=tuple(arrived[k])) if k in arrived else step
        for k, step in enumerate(program.steps)
    )
    return replace(program, steps=steps)
