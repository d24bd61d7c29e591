"""Fixtures every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.worker_pool import WorkerPool

os.environ.setdefault("OMP_NUM_THREADS", "1")  # bit-identity is promised per number of threads


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Worker processes shared by the whole session."""
    shared = WorkerPool(preload=["tests.pretrain_runs"])  # what most bodies import
    yield shared
    shared.close()
