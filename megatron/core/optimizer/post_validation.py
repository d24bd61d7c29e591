"""An optimizer step without a meeting of the ranks, put right later if it was wrong.

The procedure is that of arXiv:2401.10241, section 4 and appendix C. A rank steps as soon as it
knows the gradients of the pipeline ranks up to itself (`step`); what all ranks' gradients mean
comes back from the last rank during the next iteration's warm-up (`verdict`, `settle`). Unlike
there, undoing a step is exact: what it overwrites is copied before, and put back.

The squared norms of all parameters travel as one vector, so the global norm is added up in the
same order as by the synchronous step (grad_norm.py), and is the same to the last bit.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megatron.core.optimizer.optimizer import MegatronOptimizer, StepResult

_PREFIX_TAG = 33


class PostValidation:
    """Early steps of one rank's `MegatronOptimizer`, at most one of them unsettled.

    `pipeline` joins the hosts of one pipeline's ranks in pipeline order (a gloo group);
    `data_parallel_group` the replicas if the optimizer is sharded over them, else None.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        pipeline: dist.ProcessGroup,
        data_parallel_group: dist.ProcessGroup | None,
    ) -> None:
        self.optimizer = optimizer
        self._pipeline = pipeline
        self._data_parallel_group = data_parallel_group
        self._rank, self._size = dist.get_rank(pipeline), dist.get_world_size(pipeline)
        self._undo: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # (tensor, its copy)
        self._known = math.nan  # the global norm; on the last rank, while a step is unsettled
        self._leaving: list[tuple[dist.Work, torch.Tensor]] = []

    @property
    def undo_bytes(self) -> int:
        """What the copies of one step take, until it is settled."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._overwritten())

    @property
    def undo_bytes_per_parameter(self) -> float:
        """12 with AdamW (fp32 main parameter and two moments)."""
        stepped = sum(entry.main.numel() for entry in self.optimizer.entries)
        return self.undo_bytes / max(1, stepped)

    @torch.no_grad()
    def step(self) -> None:
        """Step on what is known so far, unless that shows already that it would be wrong.

        Waits for the rank before; nobody waits for this rank but the one behind.
        """
        self._finish_sends()
        self.optimizer.unscale()
        norm = self.optimizer.grad_norm.total(self._prefix())
        self._known = norm if self._rank == self._size - 1 else math.nan
        if self._is_plain(norm):
            self._undo = [(tensor, tensor.clone()) for tensor in self._overwritten()]
            self.optimizer.step_unclipped()

    def verdict(self, received: torch.Tensor | None) -> torch.Tensor:
        """The global gradient norm, fp64 (1,): as received, or on the last rank its own."""
        return torch.tensor([self._known], dtype=torch.float64) if received is None else received

    def verdict_now(self) -> torch.Tensor:
        """The same outside of an iteration. Collective over the pipeline."""
        norm = self.verdict(None)
        last = dist.get_global_rank(self._pipeline, self._size - 1)
        dist.broadcast(norm, last, group=self._pipeline)
        return norm

    @torch.no_grad()
    def settle(self, verdict: torch.Tensor) -> StepResult:
        """Keep the step if it was right; otherwise take it back and step, or skip, as is right.

        `rolled_back` of the result is the same on all ranks, also on those that had not stepped.
        """
        norm = float(verdict)
        undo, self._undo = self._undo, None
        if self._is_plain(norm):
            # A norm grows with every rank's part, so who did not step was right not to.
            assert undo is not None, "no step was taken, but it would have been right"
            self.optimizer.grad_scaler.update(found_inf=False)
            return StepResult(True, norm, None)
        for tensor, copy in undo or ():
            tensor.copy_(copy)
        if undo and not math.isfinite(norm):
            self.optimizer.write_back_params()  # otherwise the step does it
        return self.optimizer.step_with_norm(norm)._replace(rolled_back=True)

    def _is_plain(self, norm: float) -> bool:
        """Whether a step with this norm neither clips nor skips."""
        return math.isfinite(norm) and self.optimizer.clip_coefficient(norm) >= 1.0

    def _prefix(self) -> torch.Tensor:
        """Squared norms of this rank and those before it, passed on to the one behind.

        Every number is one rank's alone, so adding them up is exact.
        """
        squared = self.optimizer.grad_norm.squared_norms()
        if self._data_parallel_group is not None:
            on_device = squared.to(self.optimizer.grad_norm.communication_device)
            dist.all_reduce(on_device, group=self._data_parallel_group)
            squared = on_device.cpu()
        if self._rank > 0:
            before = torch.empty_like(squared)
            self._pipeline.recv([before], self._rank - 1, _PREFIX_TAG).wait()
            squared += before
        if self._rank < self._size - 1:
            work = self._pipeline.send([squared], self._rank + 1, _PREFIX_TAG)
            self._leaving.append((work, squared))
        return squared

    def _finish_sends(self) -> None:
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()

    def _overwritten(self) -> list[torch.Tensor]:
        """What a step changes and the model's parameters do not follow from."""
        state = self.optimizer.inner.state
        return [
            tensor
            for entry in self.optimizer.entries
            for tensor in (entry.main, *state[entry.main].values())
        ]
