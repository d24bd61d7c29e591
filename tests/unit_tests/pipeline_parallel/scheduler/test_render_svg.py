"""The picture, held against the timeline it shows; colours against what makes them legible."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET

import pytest
from render_plans import ONE_F_ONE_B, V_SPLIT

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import Instruction, Op
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.colours import INK, rgb, shade
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.question import Question
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.svg import to_svg
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"
COMPUTE = (Op.F, Op.B, Op.W, Op.BW)


def timeline_of(plan: Plan, **costs: float) -> Timeline:
    return simulate(plan, Costs.uniform(plan.placement, **costs))


def rank_groups(svg: str) -> list[ET.Element]:
    return [g for g in ET.fromstring(svg).iter(f"{SVG}g") if g.get("class") == "rank"]


@pytest.mark.parametrize("plan", [ONE_F_ONE_B, V_SPLIT], ids=lambda plan: plan.schedule)
def test_one_rectangle_per_instruction_where_the_timeline_has_it(plan: Plan) -> None:
    timeline = timeline_of(plan, forward=3.0, input_grad=2.5, weight_grad=1.25, transfer=0.25)
    for rank, group in enumerate(rank_groups(to_svg(timeline))):
        (idle,) = [r for r in group.iter(f"{SVG}rect") if r.get("class") == "idle"]
        scale = float(idle.get("width", 0)) / timeline.makespan
        bars = {r.get("data-i"): r for r in group.iter(f"{SVG}rect") if r.get("data-i")}
        assert set(bars) == {str(instruction) for instruction in plan.programs[rank]}
        for step, instruction in enumerate(plan.programs[rank]):
            bar = bars[str(instruction)]
            start, end = timeline.starts[rank][step], timeline.ends[rank][step]
            assert float(bar.get("x", -1)) == pytest.approx(start * scale, abs=0.01)
            assert float(bar.get("width", -1)) == pytest.approx((end - start) * scale, abs=0.01)


def test_bars_of_a_rank_do_not_overlap_and_stay_in_the_picture() -> None:
    svg = to_svg(timeline_of(V_SPLIT))
    width = float(ET.fromstring(svg).get("width", 0))
    for group in rank_groups(svg):
        bars = [r for r in group.iter(f"{SVG}rect") if r.get("data-i")]
        edges = sorted((float(b.get("x", 0)), float(b.get("width", 0))) for b in bars)
        for (x, bar_width), (following, _) in itertools.pairwise(edges):
            assert x + bar_width <= following + 0.01
        assert edges[-1][0] + edges[-1][1] < width


def test_micro_batch_numbers_stand_in_their_bars() -> None:
    for group in rank_groups(to_svg(timeline_of(V_SPLIT))):
        bars = [r for r in group.iter(f"{SVG}rect") if r.get("data-i")]
        numbers = [t for t in group.iter(f"{SVG}text") if not (t.text or "").startswith("rank")]
        assert len(numbers) == len(bars)
        for number in numbers:
            x = float(number.get("x", 0))
            (bar,) = [
                b
                for b in bars
                if float(b.get("x", 0)) < x < float(b.get("x", 0)) + float(b.get("width", 0))
            ]
            assert Instruction.parse(bar.get("data-i", "")).microbatch == int(number.text or -1)


@pytest.mark.parametrize(("p", "m", "numbered"), [(4, 8, True), (8, 24, True), (8, 900, False)])
def test_numbers_are_dropped_only_where_they_do_not_fit(p: int, m: int, numbered: bool) -> None:
    svg = to_svg(Question(num_ranks=p, num_microbatches=m).answer("1f1b"))
    texts = [t.text for group in rank_groups(svg) for t in group.iter(f"{SVG}text")]
    assert len(texts) == p + (2 * p * m if numbered else 0)


def test_chunks_differ_in_shade_and_the_legend_shows_both() -> None:
    root = ET.fromstring(to_svg(timeline_of(V_SPLIT)))
    keys = {r.get("fill") for r in root.iter(f"{SVG}rect") if r.get("class") == "key"}
    for op in (Op.F, Op.B, Op.W):
        for chunk in (0, 1):
            assert shade(op, chunk, 2) in keys
    fills = {g.get("fill") for g in rank_groups(to_svg(timeline_of(V_SPLIT)))[0].iter(f"{SVG}g")}
    assert fills >= {shade(op, chunk, 2) for op in (Op.F, Op.B, Op.W) for chunk in (0, 1)}


def test_the_title_has_the_figures() -> None:
    texts = [t.text for t in ET.fromstring(to_svg(timeline_of(ONE_F_ONE_B))).iter(f"{SVG}text")]
    assert texts[0] == "by-hand: p = 2, m = 2, plain placement"
    assert texts[1] == (
        "makespan 9 (bubble rate 33.3 %), longest span 9 (bubble rate 33.3 %), "
        "peak memory 2 (by rank: 2 1)"
    )


def test_gradient_reductions_are_marks_without_width() -> None:
    text = ONE_F_ONE_B.to_text().replace("0BW1", "0BW1 0AR1").replace("1BW1", "1BW1 1AR1")
    plan = Plan.from_text(text)
    paths = [
        path
        for group in rank_groups(to_svg(timeline_of(plan)))
        for path in group.iter(f"{SVG}path")
    ]
    assert [path.get("data-i") for path in paths] == ["0AR1", "1AR1"]


def test_a_name_from_a_file_cannot_break_the_picture() -> None:
    plan = Plan.of("<a & b>", ONE_F_ONE_B.placement, 2, ONE_F_ONE_B.programs)
    texts = [t.text for t in ET.fromstring(to_svg(timeline_of(plan))).iter(f"{SVG}text")]
    assert (texts[0] or "").startswith("<a & b>: p = 2")


# ---- colours ---------------------------------------------------------------

# Viénot, Brettel and Mollon (1999) for red-green blindness, in linear RGB.
_SIGHT = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
    "protanopia": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
}


def linear(colour: str) -> list[float]:
    shares = [value / 255 for value in rgb(colour)]
    return [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]


def luminance(values: list[float]) -> float:
    return 0.2126 * values[0] + 0.7152 * values[1] + 0.0722 * values[2]


def lab(values: list[float]) -> tuple[float, float, float]:
    """CIE L*a*b*, white point D65."""
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = (
        sum(a * max(v, 0.0) for a, v in zip(row, values, strict=True)) / w
        for row, w in zip(matrix, white, strict=True)
    )
    fx, fy, fz = (c ** (1 / 3) if c > 0.008856 else 7.787 * c + 16 / 116 for c in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("sight", _SIGHT)
def test_operations_differ_for_every_kind_of_sight(sight: str) -> None:
    def seen(colour: str) -> tuple[float, float, float]:
        values = linear(colour)
        return lab([sum(a * v for a, v in zip(r, values, strict=True)) for r in _SIGHT[sight]])

    for one, other in itertools.combinations(COMPUTE, 2):
        difference = math.dist(seen(shade(one, 0, 1)), seen(shade(other, 0, 1)))
        assert difference > 19, (one, other)
    for op in COMPUTE:
        assert math.dist(seen(shade(op, 0, 2)), seen(shade(op, 1, 2))) > 15, op


@pytest.mark.parametrize("op", COMPUTE)
@pytest.mark.parametrize("chunk", [0, 1, 2, 3])
def test_text_is_readable_on_every_shade(op: Op, chunk: int) -> None:
    light, dark = luminance(linear(shade(op, chunk, 4))), luminance(linear(INK))
    assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2, level AA
