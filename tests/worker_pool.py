"""The worker processes of the tests; see `megatron.training.worker_pool`."""

from megatron.training.worker_pool import RankFailure, WorkerPool

__all__ = ["RankFailure", "WorkerPool"]
