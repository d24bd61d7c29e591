"""Moves values between pipeline ranks: one FIFO channel per (source, target, kind of value).

Sends and receives are posted without blocking; only the consumer of a value waits. On nccl every
channel has a communicator of its own, on gloo a tag of its own, so that messages of one channel
never stand in another's way, also when both neighbours are the same rank (p = 2).
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.pipeline_parallel.zerobubble.scheduler.dataflow import Value
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.communication import (
    Channel,
    Message,
)

_TAGS = {"act": 1, "grad": 2}
_IDENTITY_TAG = 16  # added to a channel's tag for the identity message of debug mode


class PipelineGroups:
    """The process groups that channels run over, made once for a placement's neighbours.

    `group` joins the ranks of one pipeline, in pipeline order. On nccl, `channel_groups` has a
    two-rank group for each channel.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        channel_groups: dict[Channel, dist.ProcessGroup] | None = None,
    ) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self._channel_groups = channel_groups

    @classmethod
    def for_channels(
        cls,
        pipelines: Sequence[Sequence[int]],
        group: dist.ProcessGroup | None,
        channels: Sequence[Channel],
        *,
        timeout: datetime.timedelta | None = None,
    ) -> PipelineGroups:
        """Groups for these channels. Collective: every rank of the job calls it alike.

        `pipelines` lists the global ranks of every pipeline of the job.
        """
        if group is None or dist.get_backend(group) != "nccl":
            return cls(group)
        mine: dict[Channel, dist.ProcessGroup] = {}
        me = dist.get_rank()
        for ranks in pipelines:
            for channel in channels:
                pair = sorted((ranks[channel.source], ranks[channel.target]))
                made = dist.new_group(pair, timeout=timeout, backend="nccl")
                if me in pair:
                    mine[channel] = made
        return cls(group, mine)

    def route(self, channel: Channel, peer: int) -> tuple[dist.ProcessGroup, int, int]:
        """(group, peer's rank in it, tag) for one channel."""
        assert self.group is not None, "a single rank has no channels"
        if self._channel_groups is None:
            return self.group, peer, _TAGS[channel.kind]
        group = self._channel_groups[channel]
        return group, dist.get_group_rank(group, dist.get_global_rank(self.group, peer)), 0


class Channels:
    """This rank's ends of all channels, for one iteration. Empty before and after."""

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
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        self._check_identity = check_identity
        self._routes: dict[Channel, tuple[dist.ProcessGroup, int, int]] = {}
        self._arriving: dict[Value, tuple[list[dist.Work], torch.Tensor, torch.Tensor | None]] = {}
        self._leaving: dict[Value, list[tuple[dist.Work, torch.Tensor]]] = {}

    def post_receive(self, message: Message) -> None:
        """Make room for a message and start receiving it; a fresh tensor each time."""
        group, peer, tag = self._route(message.channel, message.channel.source)
        works = []
        identity = None
        if self._check_identity:
            identity = torch.empty(3, dtype=torch.long, device=self._device)
            works.append(group.recv([identity], peer, tag + _IDENTITY_TAG))
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        works.append(group.recv([tensor], peer, tag))
        assert message.value not in self._arriving, f"{message.value} is received twice"
        self._arriving[message.value] = (works, tensor, identity)

    def wait_receive(self, message: Message) -> torch.Tensor:
        """The message's tensor, once it is here."""
        works, tensor, identity = self._arriving.pop(message.value)
        for work in works:
            work.wait()
        if identity is not None:
            self._verify(message, identity)
        return tensor

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Start sending; the tensor is kept until `release` or the end."""
        group, peer, tag = self._route(message.channel, message.channel.target)
        if tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise ScheduleError(
                f"{message.value} has shape {tuple(tensor.shape)} {tensor.dtype}, but the pipeline "
                f"sends {self._shape} {self._dtype}; a stage must keep the hidden shape"
            )
        leaving = []
        if self._check_identity:
            identity = _identity_of(message.value).to(self._device)
            leaving.append((group.send([identity], peer, tag + _IDENTITY_TAG), identity))
        tensor = tensor.contiguous()
        leaving.append((group.send([tensor], peer, tag), tensor))
        self._leaving[message.value] = leaving

    def release(self, message: Message) -> None:
        """Let go of a tensor that is known to have arrived."""
        for work, _ in self._leaving.pop(message.value):
            work.wait()

    def finish(self) -> None:
        """Wait until everything has left; nothing may be left to arrive."""
        for leaving in self._leaving.values():
            for work, _ in leaving:
                work.wait()
        self._leaving.clear()
        assert not self._arriving, f"received and never used: {list(self._arriving)}"

    def _route(self, channel: Channel, peer: int) -> tuple[dist.ProcessGroup, int, int]:
        route = self._routes.get(channel)
        if route is None:
            route = self._routes[channel] = self._groups.route(channel, peer)
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
