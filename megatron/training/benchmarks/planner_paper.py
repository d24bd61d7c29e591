"""Published figures as cases for our schedules: arXiv:2401.10241 and searches over its profiles.

Times are those the paper measured (table 9) and those its authors' code holds for ZB-V (per chunk,
so doubled here). Bubble rate = (longest span - work) / longest span. Memory is counted as in the
paper, table 1: M_B from F to B, M_W from B to W, sequence length 1024; the unit is M_B, so a limit
of p is the memory of 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.core.pipeline_parallel.zerobubble.scheduler.render.model_costs import EqualRanks
from megatron.training.benchmarks.planner_cases import Case

SEQ_LENGTH = 1024
DIGITS = 4  # of the printed rates


class Model(NamedTuple):
    """arXiv:2401.10241, table 3."""

    hidden_size: int
    num_heads: int

    @property
    def share_kept_for_w(self) -> float:
        """M_W / M_B of a layer: 32 h against 34 h + 5 a s bytes per token (table 1)."""
        return 32 * self.hidden_size / (34 * self.hidden_size + 5 * self.num_heads * SEQ_LENGTH)


class Profile(NamedTuple):
    """Times of one micro-batch through all layers of one rank, and of one transfer; ms."""

    forward: float
    input_grad: float
    weight_grad: float
    transfer: float


MODELS = {
    "1.5B": Model(2304, 24),
    "6.2B": Model(4096, 32),
    "14.6B": Model(5120, 40),
    "28.3B": Model(6144, 48),
}

# Table 9: (model, p, m) -> times.
PROFILES = {
    ("1.5B", 8, 24): Profile(18.522, 18.086, 9.337, 0.601),
    ("1.5B", 8, 32): Profile(18.513, 18.086, 9.331, 0.626),
    ("1.5B", 8, 64): Profile(18.546, 18.097, 9.321, 0.762),
    ("6.2B", 8, 24): Profile(29.718, 29.444, 19.927, 0.527),
    ("6.2B", 8, 32): Profile(29.802, 29.428, 19.530, 0.577),
    ("6.2B", 8, 64): Profile(29.935, 29.621, 19.388, 0.535),
    ("14.6B", 16, 48): Profile(11.347, 11.248, 8.132, 0.377),
    ("14.6B", 16, 64): Profile(11.307, 11.254, 8.101, 0.379),
    ("14.6B", 16, 128): Profile(11.325, 11.308, 8.109, 0.378),
    ("28.3B", 32, 96): Profile(10.419, 10.207, 7.715, 0.408),
    ("28.3B", 32, 128): Profile(10.408, 10.204, 7.703, 0.408),
    ("28.3B", 32, 256): Profile(10.402, 10.248, 7.698, 0.460),
}

# The authors' profile with two chunks (branch arxiv, efficiency.py): per chunk, in ms.
CHUNK_PROFILES = {
    ("6.2B", 16, 48): Profile(14.407, 14.380, 9.676, 1.610),
    ("6.2B", 16, 64): Profile(14.412, 14.393, 9.688, 1.621),
    ("6.2B", 16, 128): Profile(14.316, 14.306, 9.639, 1.619),
    ("14.6B", 24, 72): Profile(6.763, 6.969, 5.251, 0.755),
    ("14.6B", 24, 96): Profile(6.783, 6.984, 5.259, 0.758),
    ("14.6B", 24, 192): Profile(6.785, 6.990, 5.260, 0.770),
    ("28.3B", 32, 96): Profile(9.458, 9.748, 7.288, 0.879),
    ("28.3B", 32, 128): Profile(9.469, 9.744, 7.306, 0.892),
    ("28.3B", 32, 256): Profile(9.447, 9.644, 7.193, 0.887),
}

# Table 5: bubble rates of ZB-H1, ZB-H2, ZB-1p, ZB-2p.
TABLE_5 = {
    ("1.5B", 8, 24): (0.1585, 0.1083, 0.1585, 0.0433),
    ("1.5B", 8, 32): (0.1242, 0.0837, 0.1242, 0.0039),
    ("1.5B", 8, 64): (0.0674, 0.0444, 0.0674, 0.0026),
    ("6.2B", 8, 24): (0.1323, 0.0698, 0.1323, 0.0029),
    ("6.2B", 8, 32): (0.1045, 0.0559, 0.1045, 0.0022),
    ("6.2B", 8, 64): (0.0554, 0.0294, 0.0554, 0.0010),
    ("14.6B", 16, 48): (0.1397, 0.0672, 0.1397, 0.0066),
    ("14.6B", 16, 64): (0.1088, 0.0516, 0.1088, 0.0054),
    ("14.6B", 16, 128): (0.0576, 0.0266, 0.0576, 0.0028),
    ("28.3B", 32, 96): (0.1421, 0.0641, 0.1421, 0.0038),
    ("28.3B", 32, 128): (0.1106, 0.0490, 0.1106, 0.0029),
    ("28.3B", 32, 256): (0.0594, 0.0257, 0.0594, 0.0018),
}

# Table 8: bubble rates of ZB-H1, ZB-H2, ZB-V, on the profile with two chunks.
TABLE_8 = {
    ("6.2B", 16, 48): (0.1536, 0.0823, 0.0697),
    ("6.2B", 16, 64): (0.1198, 0.0630, 0.0533),
    ("6.2B", 16, 128): (0.0637, 0.0325, 0.0274),
    ("14.6B", 24, 72): (0.1439, 0.0628, 0.0638),
    ("14.6B", 24, 96): (0.1121, 0.0480, 0.0483),
    ("14.6B", 24, 192): (0.0595, 0.0247, 0.0250),
    ("28.3B", 32, 96): (0.1429, 0.0629, 0.0593),
    ("28.3B", 32, 128): (0.1111, 0.0478, 0.0451),
    ("28.3B", 32, 256): (0.0593, 0.0251, 0.0236),
}

# Figure 7, computed with the authors' heuristics: limit in p M_B -> bubble rate of ZB.
FRONTIER_PLAIN = {
    ("1.5B", 8, 24): {1: 0.1585, 1.25: 0.1068, 1.5: 0.0719, 1.75: 0.0433, 2: 0.0433, 3: 0.0433},
    ("1.5B", 8, 32): {1: 0.1242, 1.25: 0.0827, 1.5: 0.0456, 1.75: 0.0231, 2: 0.0039, 2.75: 0.0007},
    ("1.5B", 8, 64): {1: 0.0674, 1.25: 0.0443, 1.5: 0.0270, 1.75: 0.0118, 2: 0.0026},
    ("6.2B", 8, 24): {1: 0.1323, 1.25: 0.0751, 1.5: 0.0475, 1.75: 0.0182, 2: 0.0029},
    ("6.2B", 8, 32): {1: 0.1045, 1.25: 0.0645, 1.5: 0.0363, 1.75: 0.0138, 2: 0.0022},
    ("6.2B", 8, 64): {1: 0.0554, 1.25: 0.0337, 1.5: 0.0185, 1.75: 0.0069, 2: 0.0010},
    ("14.6B", 16, 48): {1: 0.1397, 1.25: 0.0837, 1.5: 0.0571, 1.75: 0.0289, 2: 0.0066, 3: 0.0},
    ("14.6B", 16, 64): {1: 0.1088, 1.25: 0.0643, 1.5: 0.0437, 1.75: 0.0222, 2: 0.0054},
    ("14.6B", 16, 128): {1: 0.0576, 1.25: 0.0333, 1.5: 0.0224, 1.75: 0.0113, 2: 0.0028},
    ("28.3B", 32, 96): {1: 0.1421, 1.25: 0.0867, 1.5: 0.0604, 1.75: 0.0326, 2: 0.0038},
    ("28.3B", 32, 128): {1: 0.1106, 1.25: 0.0665, 1.5: 0.0461, 1.75: 0.0247, 2: 0.0029},
    ("28.3B", 32, 256): {1: 0.0594, 1.25: 0.0350, 1.5: 0.0242, 1.75: 0.0131, 2: 0.0018},
}

# Figure 9 (branch arxiv, mem2bubble.npy), on the profile with two chunks:
# (schedule, (model, p, m)).
FRONTIER_CHUNKS = {
    ("zb", ("6.2B", 16, 48)): {
        1: 0.1536, 1.125: 0.1272, 1.25: 0.0998, 1.375: 0.0773, 1.5: 0.0632, 1.75: 0.0350, 2: 0.0077
    },
    ("zb-v", ("6.2B", 16, 48)): {
        1: 0.0697, 1.125: 0.0497, 1.25: 0.0306, 1.375: 0.0203, 1.5: 0.0065, 1.75: 0.0035, 2: 0.0035
    },
    ("zb-v", ("14.6B", 24, 72)): {
        1: 0.0638, 1.125: 0.0419, 1.25: 0.0222, 1.375: 0.0143, 1.5: 0.0039
    },
    ("zb", ("28.3B", 32, 96)): {
        1: 0.1429, 1.125: 0.1127, 1.25: 0.0907, 1.375: 0.0783, 1.5: 0.0654, 1.75: 0.0387, 2: 0.0104
    },
    ("zb-v", ("28.3B", 32, 96)): {
        1: 0.0593, 1.125: 0.0383, 1.25: 0.0177, 1.375: 0.0116, 1.5: 0.0032
    },
}  # fmt: skip


class Found(NamedTuple):
    """A bubble rate that a slow search found; memory as M_W = M_B, one limit on every rank."""

    schedule: str
    num_chunks: int | None
    num_ranks: int
    num_microbatches: int
    profile: Profile
    limit: float
    rate: float  # to three digits


_UNIT = Profile(1.0, 1.0, 1.0, 0.0)
_UNIT_TRANSFER = Profile(1.0, 1.0, 1.0, 0.05)

SEARCHED = (
    Found("v-half", None, 4, 4, _UNIT_TRANSFER, 3, 0.221),
    Found("v-half", None, 4, 4, PROFILES["6.2B", 8, 24], 3, 0.254),
    Found("v-min", None, 8, 8, PROFILES["6.2B", 8, 24], 4, 0.385),
    Found("zb-interleaved", 2, 4, 4, _UNIT, 4, 0.111),
    Found("zb-interleaved", 4, 4, 4, _UNIT, 4, 0.059),
    Found("zb-interleaved", 4, 4, 8, PROFILES["1.5B", 8, 24], 4, 0.062),
)


def paper_cases() -> list[Case]:
    """Every published figure, table by table."""
    return [*table_5(), *table_8(), *frontier(), *searched()]


def table_5() -> Iterator[Case]:
    for key, (h1, h2, one_p, two_p) in TABLE_5.items():
        _, p, _ = key
        costs = _costs(key, PROFILES[key])
        yield _case("table 5 ZB-H1", "zb-h1", key, costs, p, h1)
        yield _case("table 5 ZB-H2", "zb-h2", key, costs, 2 * p - 1, h2)
        yield _case("table 5 ZB-1p", "zb", key, costs, p, one_p)
        yield _case("table 5 ZB-2p", "zb", key, costs, 2 * p, two_p)


def table_8() -> Iterator[Case]:
    for key, (h1, h2, zb_v) in TABLE_8.items():
        _, p, _ = key
        costs = _costs(key, _two_chunks(key))
        yield _case("table 8 ZB-H1", "zb-h1", key, costs, p, h1)
        yield _case("table 8 ZB-H2", "zb-h2", key, costs, 2 * p - 1, h2)
        yield _case("table 8 ZB-V", "zb-v", key, costs, p, zb_v)


def frontier() -> Iterator[Case]:
    """Limits against bubble rates."""
    for key, rates in FRONTIER_PLAIN.items():
        costs = _costs(key, PROFILES[key])
        for limit, rate in rates.items():
            yield _case("figure 7 ZB", "zb", key, costs, limit * key[1], rate)
    for (schedule, key), rates in FRONTIER_CHUNKS.items():
        costs = _costs(key, _two_chunks(key))
        for limit, rate in rates.items():
            yield _case(f"figure 9 {schedule}", schedule, key, costs, limit * key[1], rate)


def searched() -> Iterator[Case]:
    for found in SEARCHED:
        yield Case(
            name="searched",
            schedule=found.schedule,
            num_ranks=found.num_ranks,
            num_microbatches=found.num_microbatches,
            num_chunks=found.num_chunks,
            costs=EqualRanks(**found.profile._asdict()),
            memory_limits=(found.limit,) * found.num_ranks,
            stated_limit=f"{found.limit:g}",
            **_figure(found.rate, found.num_microbatches, found.profile, digits=3)._asdict(),
        )


Key = tuple[str, int, int]  # model, p, m


def _two_chunks(key: Key) -> Profile:
    """The profile per chunk as times of a rank's two chunks; each transfer stays what it is."""
    chunk = CHUNK_PROFILES[key]
    return Profile(2 * chunk.forward, 2 * chunk.input_grad, 2 * chunk.weight_grad, chunk.transfer)


def _costs(key: Key, profile: Profile) -> EqualRanks:
    return EqualRanks(**profile._asdict(), held_b_to_w=MODELS[key[0]].share_kept_for_w)


def _case(name: str, schedule: str, key: Key, costs: EqualRanks, limit: float, rate: float) -> Case:
    model, p, m = key
    profile = Profile(costs.forward, costs.input_grad, costs.weight_grad, costs.transfer)
    return Case(
        name=f"{name} {model}",
        schedule=schedule,
        num_ranks=p,
        num_microbatches=m,
        costs=costs,
        memory_limits=(limit,) * p,
        stated_limit=f"{limit / p:g} p",
        **_figure(rate, m, profile, digits=DIGITS)._asdict(),
    )


class _Figure(NamedTuple):
    cost: float
    tolerance: float


def _figure(rate: float, m: int, profile: Profile, *, digits: int) -> _Figure:
    """Cost and tolerance of a case from a printed bubble rate: half of its last digit may be
    rounding."""
    work = m * (profile.forward + profile.input_grad + profile.weight_grad)
    half = 0.5 * 10.0**-digits
    return _Figure(cost=work / (1 - rate), tolerance=(1 - rate) / (1 - rate - half) - 1)
