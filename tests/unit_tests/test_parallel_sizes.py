"""Rank arithmetic against the worked example of Megatron's documentation and its closed form."""

import itertools

import pytest

from megatron.core.parallel_sizes import PIPELINE_BEFORE_DATA_ORDER, ParallelSizes


def test_documented_example_of_eight_ranks():
    sizes = ParallelSizes.for_world(8, tp=2, pp=2)
    assert sizes.dp == 2
    assert sizes.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sizes.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sizes.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert sizes.groups("tp", "pp") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert sizes.groups() == [[rank] for rank in range(8)]


def test_rank_formula():
    sizes = ParallelSizes(tp=2, cp=3, dp=4, pp=5)
    for tp, cp, dp, pp in itertools.product(range(2), range(3), range(4), range(5)):
        expected = tp + 2 * (cp + 3 * (dp + 4 * pp))
        assert sizes.rank_of(tp=tp, cp=cp, dp=dp, pp=pp) == expected
        assert sizes.coordinates_of(expected) == (tp, cp, dp, pp)


def test_pipeline_before_data():
    sizes = ParallelSizes.for_world(8, tp=2, pp=2, order=PIPELINE_BEFORE_DATA_ORDER)
    assert sizes.rank_of(pp=1) == 2
    assert sizes.rank_of(dp=1) == 4
    assert sizes.groups("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sizes.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize("axes", [("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp"), ("tp", "pp")])
def test_groups_partition_the_world(order, axes):
    sizes = ParallelSizes(tp=2, cp=2, dp=3, pp=2, order=order)
    groups = sizes.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(24))
    for group in groups:
        assert group == sorted(group)
        assert all(sizes.group_of(rank, *axes) == group for rank in group)
        for a, b in itertools.combinations(group, 2):
            changed = {
                axis
                for axis, x, y in zip(
                    ("tp", "cp", "dp", "pp"),
                    sizes.coordinates_of(a),
                    sizes.coordinates_of(b),
                    strict=True,
                )
                if x != y
            }
            assert changed <= set(axes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelSizes(tp=0), "tp is 0"),
        (lambda: ParallelSizes.for_world(6, tp=4), "world size 6 is not a multiple of tp 4"),
        (lambda: ParallelSizes.for_world(8, pp=0), "pp 0"),
        (lambda: ParallelSizes(order="tp-dp"), "order 'tp-dp' does not name each"),
        (lambda: ParallelSizes(tp=2).rank_of(tp=2), "tp position 2 is outside 0..1"),
        (lambda: ParallelSizes(tp=2).coordinates_of(2), "rank 2 is outside 0..1"),
    ],
)
def test_impossible_sizes(make, message):
    with pytest.raises(ValueError, match=message):
        make()
