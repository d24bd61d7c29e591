"""The HTML page: its data, its timing rule in node, and the page itself in headless Chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from render_plans import ONE_F_ONE_B, V_SPLIT

from megatron.core.pipeline_parallel.zerobubble.scheduler import render
from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.html import to_html
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.question import Question
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.trace import events_of
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import Timeline, simulate

RETIME = Path(render.__file__).parent / "page" / "retime.js"
NODE = shutil.which("node")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")

needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")

# Unequal stages, so that a mix-up of stages or ranks shows.
V_COSTS = Costs(
    forward=(1.0, 1.5, 2.0, 2.5),
    input_grad=(1.25, 1.0, 0.75, 3.0),
    weight_grad=(0.5, 0.25, 1.0, 0.125),
    transfer=0.375,
    held_f_to_b=(1.0, 2.0, 1.0, 1.0),
    held_b_to_w=(0.5, 0.5, 0.25, 0.5),
)
# What the sliders are set to: totals of one rank for F, B, W, and the transfer.
SETTINGS: tuple[dict[str, float], ...] = (
    {"F": 3.5, "B": 3.0, "W": 0.9375, "transfer": 0.375},  # as they are: the means over the ranks
    {"F": 1.0, "B": 6.0, "W": 0.0, "transfer": 0.0},
    {"F": 7.25, "B": 0.5, "W": 3.0, "transfer": 2.0},
)


def scaled(costs: Costs, totals: dict[str, float], num_ranks: int) -> Costs:
    """Costs with new totals per rank, stage by stage in proportion."""

    def stretch(values: Sequence[float], total: float) -> tuple[float, ...]:
        return tuple(value * total * num_ranks / sum(values) for value in values)

    return replace(
        costs,
        forward=stretch(costs.forward, totals["F"]),
        input_grad=stretch(costs.input_grad, totals["B"]),
        weight_grad=stretch(costs.weight_grad, totals["W"]),
        transfer=totals["transfer"],
    )


def page_data(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert match is not None
    return json.loads(match[1])


def registered_timelines() -> list[Timeline]:
    """What each registered schedule plans for p = 3, m = 6 (or refuses)."""
    question = Question(num_ranks=3, num_microbatches=6)
    timelines = []
    for name in SCHEDULES:
        try:
            timelines.append(question.answer(name))
        except ScheduleError:
            continue
    return timelines


# ---- the page as text ------------------------------------------------------


def test_the_page_needs_no_network() -> None:
    page = to_html([simulate(V_SPLIT, V_COSTS)])
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://|fetch\(|XMLHttp", page)


def test_a_name_from_a_file_cannot_leave_its_place() -> None:
    plan = Plan.of("</script><b>&", V_SPLIT.placement, 2, V_SPLIT.programs)
    page = to_html([simulate(plan, V_COSTS)])
    assert "</script><b>" not in page
    assert page_data(page)["plans"][0]["heading"].startswith("</script><b>&: p = 2")


def test_waits_are_listed_for_other_ranks_alone() -> None:
    plan = page_data(to_html([simulate(V_SPLIT, V_COSTS)]))["plans"][0]
    program = dict(zip(plan["programs"][0].split(), plan["inputs"][0], strict=True))
    assert program["0F1"] == 0  # reads data
    assert program["3F0"] == [1, 1]  # 2F0 is step 1 of rank 1
    assert program["3B0"] == 0  # the loss is its own
    assert program["0B1"] == [1, 10]  # 1B1


def test_memory_levels_and_limits_are_in_the_page() -> None:
    timeline = simulate(V_SPLIT, V_COSTS)
    plan = page_data(to_html([timeline], memory_limits=(4.0, 5.0)))["plans"][0]
    assert plan["limits"] == [4.0, 5.0]
    assert [max(levels) for levels in plan["levels"]] == list(timeline.peaks)
    assert all(levels[-1] == pytest.approx(0.0) for levels in plan["levels"])


def test_a_measured_order_is_compared_with_the_plan() -> None:
    timeline = simulate(V_SPLIT, V_COSTS)
    events = events_of(timeline)
    same = page_data(to_html([timeline], unit="us", measured=events))["plans"][0]
    assert same["note"] == "The measured order is the planned one on every rank."
    assert same["measured"][0][0] == ["0F0", 0.0, 1.0]
    less = page_data(to_html([timeline], unit="us", measured=events[:-1]))["plans"][0]
    assert "rank 1: the plan has 12 instructions, the trace 11" in less["note"]


# ---- the timing rule in node ----------------------------------------------


def retimed_by_node(page: str, settings: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """What retime.js makes of the first plan of a page, for each setting of the sliders."""
    script = f"""
        const {{ parseProgram, retime, rescaled }} = require({json.dumps(str(RETIME))});
        const data = {json.dumps(page_data(page))};
        const plan = {{ ...data.plans[0], programs: data.plans[0].programs.map(parseProgram),
            inputs: data.plans[0].inputs.map((row) => row.map((places) => places || [])) }};
        console.log(JSON.stringify({json.dumps(list(settings))}.map((totals) => (
            retime(plan, rescaled(plan.costs, data.base, totals, plan.programs.length))))));
    """
    assert NODE is not None
    done = subprocess.run(
        [NODE, "-"], input=script, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def assert_same_times(found: dict[str, Any], expected: Timeline) -> None:
    for rank in range(expected.plan.num_ranks):
        assert found["starts"][rank] == pytest.approx(expected.starts[rank])
        assert found["ends"][rank] == pytest.approx(expected.ends[rank])


@needs_node
def test_the_javascript_rule_is_that_of_simulate() -> None:
    page = to_html([simulate(V_SPLIT, V_COSTS)])
    for found, totals in zip(retimed_by_node(page, SETTINGS), SETTINGS, strict=True):
        expected = simulate(V_SPLIT, scaled(V_COSTS, totals, 2))
        assert_same_times(found, expected)
        assert found["makespan"] == pytest.approx(expected.makespan)
        assert found["longestSpan"] == pytest.approx(expected.longest_span)
        assert found["work"] == pytest.approx(max(expected.work))
        rates = (found["bubbleRateMakespan"], found["bubbleRateSpan"])
        assert rates == pytest.approx(
            (expected.bubble_rate("makespan"), expected.bubble_rate("span"))
        )


@needs_node
def test_a_slider_raises_costs_that_were_zero() -> None:
    page = to_html([simulate(V_SPLIT, replace(V_COSTS, weight_grad=(0.0,) * 4))])
    totals = {**SETTINGS[0], "W": 2.0}
    (found,) = retimed_by_node(page, [totals])
    assert_same_times(found, simulate(V_SPLIT, replace(V_COSTS, weight_grad=(1.0,) * 4)))


@needs_node
@pytest.mark.parametrize("timeline", registered_timelines(), ids=lambda t: t.plan.schedule)
def test_every_schedule_is_timed_alike(timeline: Timeline) -> None:
    totals = {"F": 2.0, "B": 3.0, "W": 1.25, "transfer": 0.375}
    (found,) = retimed_by_node(to_html([timeline]), [totals])
    assert_same_times(found, simulate(timeline.plan, scaled(timeline.costs, totals, 3)))


# ---- the page in a browser -------------------------------------------------

InPage = Callable[..., dict[str, Any]]


@pytest.fixture
def in_page(tmp_path: Path) -> InPage:
    """Opens a page in headless Chromium, runs a script in it, returns the script's object."""

    def run(page: str, script: str, address: str = "") -> dict[str, Any]:
        report = (
            "<script>window.addEventListener('error', (event) => {"
            " document.body.dataset.failure = event.message; });</script>"
        )
        run_it = f"<script>const result = (() => {{ {script} }})();"
        run_it += "const box = document.createElement('pre'); box.id = 'result';"
        run_it += "box.textContent = JSON.stringify(result); document.body.append(box);</script>"
        path = tmp_path / "page.html"
        path.write_text(page.replace("<main>", report + "<main>").replace("</body>", run_it))
        assert BROWSER is not None
        command = [
            BROWSER,
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,900", "--dump-dom"),
            path.as_uri() + address,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
        failure = re.search(r'data-failure="([^"]*)"', done.stdout)
        assert failure is None, failure and failure[1]
        match = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
        assert match is not None, done.stdout[-2000:]
        return json.loads(html.unescape(match[1]))

    return run


@needs_browser
def test_sliders_retime_both_plans(in_page: InPage) -> None:
    second = Costs.uniform(
        ONE_F_ONE_B.placement, forward=3.5, input_grad=3.0, weight_grad=0.9375, transfer=0.375
    )
    timelines = [simulate(V_SPLIT, V_COSTS), simulate(ONE_F_ONE_B, second)]
    totals = {"F": 2.0, "B": 1.5, "W": 4.0, "transfer": 1.0}
    script = """
        const sliders = document.querySelectorAll('input[type="range"]');
        const before = sliders[0].value;
        const box = document.querySelector('input[type="number"][name="B"]');
        box.value = 1.5; box.dispatchEvent(new Event("input"));
        const rows = [...document.querySelectorAll("#figures tbody tr")];
        return { before, times: timings, rows: rows.map((row) => row.innerText),
                 b: document.querySelector('input[type="range"][name="B"]').value,
                 canvases: document.querySelectorAll("canvas").length };
    """
    found = in_page(to_html(timelines), script, "#F=2&W=4&transfer=1")
    expected = [simulate(t.plan, scaled(t.costs, totals, 2)) for t in timelines]
    for times, timeline in zip(found["times"], expected, strict=True):
        assert_same_times(times, timeline)
    assert float(found["before"]) == pytest.approx(2.0, abs=0.02)  # the address set the slider
    assert float(found["b"]) == pytest.approx(1.5, abs=0.02)  # the number moves its slider
    assert found["canvases"] == 2
    assert f"{expected[1].makespan:g}" in found["rows"][1]
    ratio = expected[1].makespan / expected[0].makespan
    assert f"{ratio:.3f} ×" in found["rows"][2]


@needs_browser
def test_pointing_zooming_and_panning(in_page: InPage) -> None:
    timeline = Question(num_ranks=2, num_microbatches=2).timeline(V_SPLIT)
    script = """
        const canvas = document.querySelector("canvas");
        const scale = () => charts[0].scale;
        const tip = document.getElementById("tip");
        const box = canvas.getBoundingClientRect();
        const send = (kind, time, y, more = {}) => canvas.dispatchEvent(new PointerEvent(kind, {
            clientX: box.left + scale().x(time), clientY: box.top + y, bubbles: true, ...more }));
        const point = (time, rank) => {
            send("pointermove", time, rowsOf(plans[0]).top(rank) + 5);
            return tip.hidden ? null : tip.textContent;
        };
        const ink = (time, rank) => [...canvas.getContext("2d").getImageData(
            Math.round(scale().x(time) * devicePixelRatio),
            Math.round((rowsOf(plans[0]).top(rank) + 4) * devicePixelRatio), 1, 1).data];
        const result = {
            bar: point(0.25, 0), wait: point(1.25, 0), before: point(0.25, 1), over: point(6.75, 1),
            fullInk: ink(0.1, 0), lightInk: ink(1.6, 0), idleInk: ink(1.25, 0),
            all: { ...state.view },
        };
        const memoryTop = rowsOf(plans[0]).memoryTop(0) + 5;
        send("pointermove", 0.75, memoryTop);
        result.memory = tip.textContent;
        const fixed = 2.0;
        const pixel = scale().x(fixed);
        canvas.dispatchEvent(new WheelEvent("wheel", { clientX: box.left + scale().x(fixed),
            clientY: box.top + 40, deltaY: -300 * Math.log(2), ctrlKey: true, cancelable: true }));
        result.zoomed = { ...state.view };
        result.fixedMoved = scale().x(fixed) - pixel;
        result.afterZoom = point(1.75, 0);
        const from = state.view.from;
        send("pointerdown", 2.0, 40);
        send("pointermove", 2.5, 40, { buttons: 1 });
        result.panned = state.view.from - from;
        canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "0" }));
        result.reset = { ...state.view };
        document.querySelector('[data-zoom="0.5"]').click();
        result.button = state.view.to - state.view.from;
        return result;
    """
    found = in_page(to_html([timeline]), script)
    assert found["bar"].splitlines() == [
        "0F0: forward",
        "stage 0, chunk 0, micro-batch 0",
        "0 to 0.5 (0.5)",
        "memory held: 0.5",
    ]
    assert found["wait"].splitlines() == [
        "rank 0 is idle",
        "1 to 1.5 (0.5)",
        "3F0 waits for 2F0 of rank 1",
    ]
    assert found["before"].splitlines()[2:] == [
        "1F0 waits for 0F0 of rank 0",
        "not in this rank's span",
    ]
    assert found["over"].splitlines()[2] == "it has no instructions left"
    assert found["memory"] == "rank 0 at 0.75\nholds 1"
    assert found["fullInk"][:3] == [0x5B, 0x8D, 0xEF]  # F of the first chunk
    assert found["lightInk"][:3] == [0xBC, 0xD2, 0xFA]  # F of the second
    assert found["idleInk"][:3] == [0xEE, 0xF0, 0xF3]
    whole = found["all"]["to"]
    assert found["zoomed"]["to"] - found["zoomed"]["from"] == pytest.approx(whole / 2)
    assert abs(found["fixedMoved"]) < 1.0  # what the pointer is at stays there
    assert found["afterZoom"].startswith("3F0: forward")
    assert found["panned"] == pytest.approx(-0.5, abs=0.02)
    assert found["reset"] == found["all"]
    assert found["button"] == pytest.approx(whole / 2)


@needs_browser
def test_measured_bars_are_laid_under_planned_ones(in_page: InPage) -> None:
    timeline = simulate(V_SPLIT, V_COSTS)
    late = [e._replace(start_us=2 * e.start_us) for e in events_of(timeline)]
    script = """
        const canvas = document.querySelector("canvas");
        const box = canvas.getBoundingClientRect();
        canvas.dispatchEvent(new PointerEvent("pointermove", { bubbles: true,
            clientX: box.left + charts[0].scale.x(2.25),
            clientY: box.top + rowsOf(plans[0]).measuredTop(0) + 3 }));
        const rows = [...document.querySelectorAll("#figures tbody tr")];
        return { tip: document.getElementById("tip").textContent, to: state.view.to,
                 rows: rows.map((row) => row.innerText) };
    """
    found = in_page(to_html([timeline], unit="us", measured=late), script)
    assert found["tip"].splitlines() == [
        *("measured 0F1: forward", "stage 0, chunk 0, micro-batch 1"),
        *("2 us to 3 us (1 us)", "planned 1 us to 2 us (1 us)"),
    ]
    end = max(event.start_us + event.duration_us for event in late)
    assert found["to"] >= end > timeline.makespan
    assert found["rows"][1].split("\t")[:2] == ["as measured", f"{end:g} us"]
