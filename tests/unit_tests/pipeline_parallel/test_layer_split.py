"""Layers per stage: none is dropped; a split that cannot be is refused with what would work."""

import pytest

from megatron.core.pipeline_parallel.layer_split import parse_layout, split_layers, stage_offsets
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement

PLAIN_4 = Placement.plain(4)
LOOPED_2X2 = Placement.looped(2, 2)
V_4 = Placement.v_shape(4)


@pytest.mark.parametrize(
    ("num_layers", "placement", "options", "expected"),
    [
        (32, PLAIN_4, {}, (8, 8, 8, 8)),
        (32, V_4, {}, (4,) * 8),
        (32, PLAIN_4, {"first_rank_layers": 6, "last_rank_layers": 8}, (6, 9, 9, 8)),
        (31, PLAIN_4, {"last_rank_layers": 4}, (9, 9, 9, 4)),
        (8, PLAIN_4, {"first_rank_layers": 2, "last_rank_layers": 2}, (2, 2, 2, 2)),
        (6, LOOPED_2X2, {"first_rank_layers": 2}, (1, 2, 1, 2)),
        (6, Placement.v_shape(2), {"first_rank_layers": 2}, (1, 2, 2, 1)),
        (30, PLAIN_4, {"account_for_embedding": True, "account_for_loss": True}, (7, 8, 8, 7)),
        (31, PLAIN_4, {"account_for_loss": True}, (8, 8, 8, 7)),
        (6, LOOPED_2X2, {"account_for_embedding": True, "account_for_loss": True}, (1, 2, 2, 1)),
        (5, Placement.plain(1), {"account_for_embedding": True, "account_for_loss": True}, (5,)),
        (30, PLAIN_4, {"allow_padding": True}, (7, 8, 8, 7)),
        (22, Placement.plain(8), {"allow_padding": True}, (2, 3, 3, 3, 3, 3, 3, 2)),
        (13, PLAIN_4, {"allow_padding": True}, (3, 3, 4, 3)),
        (31, PLAIN_4, {"allow_padding": True}, (8, 8, 8, 7)),
        (6, V_4, {"allow_padding": True}, (0, 1, 1, 1, 1, 1, 1, 0)),
        (14, V_4, {"allow_padding": True}, (1, 2, 2, 2, 2, 2, 2, 1)),
        (32, PLAIN_4, {"allow_padding": True}, (8, 8, 8, 8)),
        (6, PLAIN_4, {"per_stage": (0, 3, 0, 3)}, (0, 3, 0, 3)),
        (30, Placement.plain(1), {}, (30,)),
        (3, Placement.plain(1), {"last_rank_layers": 3}, (3,)),
    ],
)
def test_splits(num_layers, placement, options, expected):
    counts = split_layers(num_layers, placement, **options)
    assert counts == expected
    assert sum(counts) == num_layers


@pytest.mark.parametrize(
    ("num_layers", "placement", "options", "message"),
    [
        (
            30,
            PLAIN_4,
            {},
            r"--num-layers 30 does not divide into 4 stages; use 28 or 32, pass --all",
        ),
        (30, V_4, {}, r"does not divide into 4 ranks x 2 chunks = 8 stages; use 24 or 32"),
        (40, Placement.plain(16), {}, r"use 32 or 48"),
        (40, Placement.looped(8, 2), {}, r"use 32 or 48"),
        (3, PLAIN_4, {}, r"--num-layers 3 does not divide into 4 stages; use 4,"),
        (31, PLAIN_4, {"account_for_embedding": True, "account_for_loss": True}, r"31 plus 2 for"),
        (1, PLAIN_4, {"allow_padding": True}, r"1 leaves stage 1 of 4 stages without a layer"),
        (8, Placement.plain(1), {"last_rank_layers": 2}, r"leaves 6 layers for the 0 ranks"),
        (4, Placement.plain(1), {"first_rank_layers": 4, "last_rank_layers": 3}, "cannot be met"),
        (8, PLAIN_4, {"first_rank_layers": 3}, r"8 minus 3 .* leaves 5 layers for the 3 ranks"),
        (8, PLAIN_4, {"first_rank_layers": 9}, r"leaves -1 layers"),
        (
            8,
            PLAIN_4,
            {"first_rank_layers": 4, "last_rank_layers": 4},
            r"stage 1 .* without a layer",
        ),
        (7, LOOPED_2X2, {"first_rank_layers": 3}, r"rank 0 would hold 3 layers in 2 chunks"),
        (
            8,
            PLAIN_4,
            {"per_stage": (2, 2, 2)},
            r"4 stages need 4 counts of at least 0, 3 are given",
        ),
        (8, PLAIN_4, {"per_stage": (2, 2, 2, 3)}, r"make 9, but --num-layers is 8"),
        (8, PLAIN_4, {"per_stage": (5, 5, -2, 0)}, r"at least 0"),
    ],
)
def test_refusals(num_layers, placement, options, message):
    with pytest.raises(ValueError, match=message):
        split_layers(num_layers, placement, **options)


@pytest.mark.parametrize("placement", [PLAIN_4, V_4, Placement.looped(3, 3)])
@pytest.mark.parametrize("num_layers", range(1, 41))
def test_padding_keeps_every_layer_or_refuses(placement, num_layers):
    """Counts differ by one at most, and only the stages with embedding and head may be empty."""
    try:
        counts = split_layers(num_layers, placement, allow_padding=True)
    except ValueError:
        assert num_layers < placement.num_stages - 2
        return
    assert sum(counts) == num_layers
    assert max(counts) - min(counts) <= 1
    assert min(counts[1:-1]) >= 1


def test_offsets():
    assert stage_offsets((7, 8, 0, 7)) == (0, 7, 15, 15)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ettt|tt|tt|tL", (3, 2, 2, 1)),
        ("Et*3|(tt|)*29,tL", (3, *[2] * 29, 1)),
        ("E|t*2|t*2|L", (0, 2, 2, 0)),
        ("E,(t|)*2 , tL", (1, 1, 1)),
        ("E((t*2|)*2t|)*2L", (2, 2, 1, 2, 2, 1, 0)),
        ("EttL", (2,)),
        ("Et||tL", (1, 0, 1)),
    ],
)
def test_layouts(text, expected):
    assert parse_layout(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et|mL", "multi-token prediction"),
        ("Ex|tL", "'x' is not understood"),
        ("tE|tL", "begin with the one E"),
        ("Et|tLt", "end with the one L"),
        ("EEt|L", "one E"),
        ("|Et|L", "first stage"),
        ("Et|L|", "last"),
        ("Et*|L", "repetition"),
        ("E(t|tL", "do not pair"),
        ("", "begin with the one E"),
    ],
)
def test_unreadable_layouts(text, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(text)
