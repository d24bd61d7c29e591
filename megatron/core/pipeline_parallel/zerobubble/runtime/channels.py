"""Moves values between pipeline ranks: one FIFO channel per (source, target, kind of value).

Sends and receives are posted without blocking; only the consumer of a value waits. On nccl every
channel has a communicator of its own, on gloo a tag of its own, so that messages of one channel
never stand in another's way, also when both neighbours are the same rank (p = 2).
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.pipeline_parallel.zerobubble.scheduler.dataflow import Value
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.communication import (
    Channel,
    Message,
    RankProgram,
)

_TAGS = {"act": 1, "grad": 2, "verdict": 3}
_IDENTITY_TAG = 16  # added to a channel's tag for the identity message of debug mode


class Format(NamedTuple):
    """What a channel's messages are: known to both ends, so that only tensors travel."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Route(NamedTuple):
    """Who sends and receives one channel's messages.

    The backend itself in place of its group: a group's own send and recv look the backend up
    through torch's operator dispatcher, at every message.
    """

    backend: Any  # torch.distributed.Backend, whose send and recv torch does not type
    peer: int  # its rank in the backend's group
    tag: int


# The optimizer step's global gradient norm. The host reads it, so it does not go by the device.
VERDICT = Format((1,), torch.float64, torch.device("cpu"))


class _Arriving(NamedTuple):
    """A posted receive: its work handles, where it will be, and in debug mode which value it is."""

    works: list[dist.Work]
    tensor: torch.Tensor
    identity: torch.Tensor | None

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class PipelineGroups:
    """The process groups that channels run over, made once for a placement's neighbours.

    `group` joins the ranks of one pipeline, in pipeline order. On nccl, `channel_groups` has a
    two-rank group for each channel. `control` joins the same ranks for what only their hosts read
    (gloo, always): it waits for no device and takes no turn among its messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        channel_groups: dict[Channel, dist.ProcessGroup] | None = None,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self.control = control if control is not None else group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self._channel_groups = channel_groups

    @classmethod
    def for_channels(
        cls,
        pipelines: Sequence[Sequence[int]],
        group: dist.ProcessGroup | None,
        channels: Callable[[], Sequence[Channel]],
        *,
        timeout: datetime.timedelta | None = None,
    ) -> PipelineGroups:
        """Groups for these channels. Collective: every rank of the job calls it alike.

        `pipelines` lists the global ranks of every pipeline of the job. `channels` is asked on nccl
        only: elsewhere all channels share one group.
        """
        if group is None or dist.get_backend(group) != "nccl":
            return cls(group)
        mine: dict[Channel, dist.ProcessGroup] = {}
        control = None
        me, wanted = dist.get_rank(), channels()
        for ranks in pipelines:
            made = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
            if me in ranks:
                control = made
            for channel in wanted:
                pair = sorted((ranks[channel.source], ranks[channel.target]))
                made = dist.new_group(pair, timeout=timeout, backend="nccl")
                if me in pair:
                    mine[channel] = made
        return cls(group, mine, control)

    def route(self, channel: Channel, peer: int, device: torch.device) -> _Route:
        """How messages that lie on `device` travel to or from a peer."""
        assert self.group is not None, "a single rank has no channels"
        if self._channel_groups is None or channel.kind == "verdict":
            assert self.control is not None
            return _Route(self.control._get_backend(device), peer, _TAGS[channel.kind])
        group = self._channel_groups[channel]
        peer_in_group = dist.get_group_rank(group, dist.get_global_rank(self.group, peer))
        return _Route(group._get_backend(device), peer_in_group, 0)


class Channels:
    """This rank's ends of all channels, for one iteration. Empty before and after.

    `shape`, `dtype` and `device` are those of hidden states and their gradients.
    """

    def __init__(
        self,
        groups: PipelineGroups,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        check_identity: bool = False,
    ) -> None:
        self._groups = groups
        hidden = Format(tuple(shape), dtype, device)
        self._formats = {"act": hidden, "grad": hidden, "verdict": VERDICT}
        self._check_identity = check_identity
        self._routes: dict[Channel, _Route] = {}
        self._arriving: dict[Value, _Arriving] = {}
        self._leaving: dict[Value, list[tuple[dist.Work, torch.Tensor]]] = {}
        # After `start_again`: what left before it, and receives posted before it that the first
        # messages after it will fill.
        self._left_before: list[list[tuple[dist.Work, torch.Tensor]]] = []
        self._posted_before: dict[Channel, deque[_Arriving]] = {}

    def post_receive(self, message: Message) -> None:
        """Make room for a message and start receiving it; a fresh tensor each time."""
        assert message.value not in self._arriving, f"{message.value} is received twice"
        before = self._posted_before.get(message.channel)
        arriving = before.popleft() if before else self._post(message.channel)
        self._arriving[message.value] = arriving

    def wait_receive(self, message: Message) -> torch.Tensor:
        """The message's tensor, once it is here."""
        arriving = self._arriving.pop(message.value)
        arriving.wait()
        if arriving.identity is not None:
            self._verify(message, arriving.identity)
        return arriving.tensor

    def start_again(self, program: RankProgram) -> None:
        """Void all messages sent before the senders' PV; `program` has run up to its own.

        Those that come to this rank are received and dropped. Receives that were posted for later
        messages cannot be taken back: what its sender sends first from now on fills them.
        """
        for channel, num_void in program.void:
            posted = [
                message.value
                for step in program.steps[: (program.validation_step or 0) + 1]
                for message in step.post
                if message.channel == channel
            ]
            for value in posted[:num_void]:
                if value in self._arriving:
                    self._arriving.pop(value).wait()
            for _ in range(num_void - len(posted)):
                self._post(channel).wait()
            self._posted_before[channel] = deque(
                self._arriving.pop(value) for value in posted[num_void:]
            )
        self._left_before += self._leaving.values()
        self._leaving.clear()

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Start sending; the tensor is kept until `release` or the end."""
        backend, peer, tag = self._route(message.channel, message.channel.target)
        shape, dtype, device = self._formats[message.channel.kind]
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ScheduleError(
                f"{message.value} has shape {tuple(tensor.shape)} {tensor.dtype}, but the pipeline "
                f"sends {shape} {dtype}; a stage must keep the hidden shape"
            )
        leaving = []
        if self._check_identity:
            identity = _identity_of(message.value).to(device)
            leaving.append((backend.send([identity], peer, tag + _IDENTITY_TAG), identity))
        tensor = tensor.contiguous()
        leaving.append((backend.send([tensor], peer, tag), tensor))
        self._leaving[message.value] = leaving

    def release(self, message: Message) -> None:
        """Let go of a tensor that is known to have arrived."""
        for work, _ in self._leaving.pop(message.value):
            work.wait()

    def finish(self) -> None:
        """Wait until everything has left; nothing may be left to arrive."""
        for leaving in (*self._left_before, *self._leaving.values()):
            for work, _ in leaving:
                work.wait()
        self._left_before.clear()
        self._leaving.clear()
        unused = [*self._arriving, *(c for c, before in self._posted_before.items() if before)]
        assert not unused, f"received and never used: {unused}"

    def _post(self, channel: Channel) -> _Arriving:
        backend, peer, tag = self._route(channel, channel.source)
        shape, dtype, device = self._formats[channel.kind]
        works = []
        identity = None
        if self._check_identity:
            identity = torch.empty(3, dtype=torch.long, device=device)
            works.append(backend.recv([identity], peer, tag + _IDENTITY_TAG))
        tensor = torch.empty(shape, dtype=dtype, device=device)
        works.append(backend.recv([tensor], peer, tag))
        return _Arriving(works, tensor, identity)

    def _route(self, channel: Channel, peer: int) -> _Route:
        route = self._routes.get(channel)
        if route is None:
            device = self._formats[channel.kind].device
            route = self._routes[channel] = self._groups.route(channel, peer, device)
        return route

    def _verify(self, message: Message, identity: torch.Tensor) -> None:
        expected = _identity_of(message.value)
        if not torch.equal(identity.cpu(), expected):
            raise ScheduleError(
                f"rank {self._groups.rank} expected {message.value} from rank "
                f"{message.channel.source}, but message {identity.tolist()} came "
                f"(expected {expected.tolist()}: kind, stage, micro-batch)"
            )


def _identity_of(value: Value) -> torch.Tensor:
    return torch.tensor([_TAGS[value.kind], value.stage, value.microbatch], dtype=torch.long)
