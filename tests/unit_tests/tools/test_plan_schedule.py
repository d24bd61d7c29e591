"""tools/plan_schedule.py: what it prints, writes and refuses."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.model_costs import EqualRanks
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.question import Question
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import Timeline

TOOL = Path(__file__).parents[3] / "tools" / "plan_schedule.py"
# GPT 6.2B on 8 ranks, arXiv:2401.10241 table 9, in microseconds.
PAPER_TIMES = ("--costs-us", "29718,29444,19927,527")
PAPER_COSTS = EqualRanks(forward=29718, input_grad=29444, weight_grad=19927, transfer=527)


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_schedule", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the tool; returns (exit status, stdout, stderr)."""

    def run_tool(*words: str) -> tuple[int, str, str]:
        try:
            status = tool.main(list(words))
        except SystemExit as end:  # argparse
            status = int(end.code or 0)
        return (status, *capsys.readouterr())

    return run_tool


def as_json(run: Any, *words: str) -> dict[str, Any]:
    status, out, _ = run(*words, "--json")
    assert status == 0
    return json.loads(out)


def runnable(p: int, m: int, costs: EqualRanks | None = None) -> dict[str, Timeline]:
    """Every registered schedule that can run at these sizes."""
    question = Question(num_ranks=p, num_microbatches=m, costs=costs or EqualRanks())
    found = {}
    for name in SCHEDULES:
        try:
            found[name] = question.answer(name)
        except ScheduleError:
            continue
    return found


# ---- one plan --------------------------------------------------------------


def test_grid_and_figures_are_printed(run: Any) -> None:
    status, out, _ = run("--schedule", "1f1b", "-p", "4", "-m", "8")
    assert status == 0
    assert "rank 3 |         F0 BW0-- F1 BW1--" in out
    assert "\nmakespan      33, bubble rate 27.3 %" in out
    assert "\npeak memory   4; by rank: 4 3 2 1" in out
    assert "\x1b" not in out  # not a terminal


def test_the_report_s_bubble_is_printed(run: Any) -> None:
    # p = 4, m = 64 (the report that started the project): 1F1B's bubble is 3/67 = 4.5 %.
    _, out, _ = run("--schedule", "1f1b", "-p", "4", "-m", "64", "--no-grid")
    assert "bubble rate 4.5 %" in out
    data = as_json(run, "--schedule", "1f1b", "-p", "4", "-m", "64")
    assert data["bubble_rate_makespan"] == pytest.approx(3 / 67)


def test_the_paper_s_bubble_rate_comes_out(run: Any) -> None:
    # arXiv:2401.10241 table 5: 1F1B, 6.2B, p = 8, m = 24.
    data = as_json(run, "--schedule", "1f1b", "-p", "8", "-m", "24", *PAPER_TIMES)
    assert data["bubble_rate_span"] == pytest.approx(0.2347, abs=5e-5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_json_is_that_of_the_simulation(run: Any, name: str) -> None:
    timeline = runnable(3, 6).get(name)
    if timeline is None:
        pytest.skip(f"{name} refuses p = 3, m = 6")
    data = as_json(run, "--schedule", name, "-p", "3", "-m", "6")
    assert (data["schedule"], data["p"], data["m"]) == (timeline.plan.schedule, 3, 6)
    assert data["placement"] == [list(slot) for slot in timeline.plan.placement.slots]
    assert data["makespan"] == timeline.makespan
    assert data["longest_span"] == timeline.longest_span
    assert data["bubble_rate_makespan"] == timeline.bubble_rate("makespan")
    assert data["bubble_rate_span"] == timeline.bubble_rate("span")
    assert data["peak_memory"] == list(timeline.peaks)
    words = [word for program in data["programs"] for word in program]
    assert all(re.fullmatch(r"\d+(F|B|W|BW)\d+", word) for word in words)
    stages = len(data["placement"])
    assert sum("F" in word for word in words) == 6 * stages
    assert sum("W" in word for word in words) == 6 * stages


def test_per_stage_costs_and_memory_reach_the_simulation(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    names = ("forward", "input_grad", "weight_grad")
    path.write_text(json.dumps({name: [2.0, 3.0] for name in names} | {"transfer": 1.0}))
    words = ("--schedule", "1f1b", "-p", "2", "-m", "1", "--costs", str(path))
    data = as_json(run, *words, "--memory", "4,1")
    # F 2, transfer 1, F 3, BW 6, transfer 1, BW 4.
    assert data["makespan"] == pytest.approx(17.0)
    assert data["peak_memory"] == [4.0, 4.0]
    _, out, _ = run(*words)
    assert "makespan      17 us" in out


def test_a_small_gain_is_warned_of(run: Any) -> None:
    gains = runnable(2, 60)
    for name, timeline in gains.items():
        _, out, _ = run("--schedule", name, "-p", "2", "-m", "60", "--no-grid")
        small = timeline.makespan * 1.05 > gains["1f1b"].makespan
        assert ("warning       the gain" in out) == (small and name != "1f1b"), name


# ---- files -----------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_saved_plan_is_valid_and_shows_the_same(run: Any, tmp_path: Path, name: str) -> None:
    if name not in runnable(2, 6):
        pytest.skip(f"{name} refuses p = 2, m = 6")
    path = tmp_path / "saved.plan"
    planned = as_json(run, "--schedule", name, "-p", "2", "-m", "6", "--save", str(path))
    assert Plan.load(path).num_microbatches == 6
    status, out, _ = run("--validate", str(path))
    assert (status, out.splitlines()[0]) == (0, f"OK: {path} is valid")
    assert as_json(run, "--plan", str(path)) == planned
    assert as_json(run, "--validate", str(path)) == {"valid": True, **planned}


def test_an_invalid_plan_names_the_first_bad_instruction(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.plan"
    run("--schedule", "1f1b", "-p", "2", "-m", "2", "--save", str(path))
    path.write_text(path.read_text().replace("1F0 1BW0", "1BW0 1F0"))
    status, out, _ = run("--validate", str(path))
    assert status == 1
    assert out.startswith("invalid: ")
    assert "rank 1 step 0: 1BW0" in out
    status, out, _ = run("--validate", str(path), "--json")
    assert status == 1
    assert json.loads(out)["valid"] is False
    status, _, error = run("--plan", str(path))
    assert status == 2
    assert error.startswith(f"plan_schedule.py: --plan {path}: ")


def test_a_plan_over_its_memory_limit_is_invalid(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.plan"
    run("--schedule", "1f1b", "-p", "2", "-m", "4", "--save", str(path))
    assert run("--validate", str(path), "--memory-limit", "2,1")[0] == 0
    status, out, _ = run("--validate", str(path), "--memory-limit", "1")
    assert status == 1
    assert "0F1 raises the memory held to 2, above the limit 1" in out


def test_pictures_pages_and_traces_are_written(run: Any, tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("svg", "html", "trace")}
    flags = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    words = ("--schedule", "1f1b", "-p", "2", "-m", "3", *flags, "--against", "1f1b")
    status, _, error = run(*words)
    assert status == 0
    assert error.count("wrote ") == 3
    assert files["svg"].read_text().count("data-i=") == 2 * 2 * 3
    assert files["html"].read_text().count('"heading":"1f1b: p = 2, m = 3') == 2
    events = json.loads(files["trace"].read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 2 * 3
    measured = ("--measured", str(files["trace"]), "--html", str(files["html"]))
    status, out, _ = run("--schedule", "1f1b", "-p", "2", "-m", "3", *measured)
    assert status == 0
    assert "measured      in the planned order on every rank" in out
    # Without costs the plan is timed by the trace: makespan (3 + 1) * 3.
    assert "makespan      12 us" in out


# ---- comparison ------------------------------------------------------------


def test_all_schedules_are_compared(run: Any) -> None:
    status, out, _ = run("--compare", "all", "-p", "4", "-m", "8")
    assert status == 0
    for name in SCHEDULES:
        assert re.search(rf"^ *{re.escape(name)} ", out, re.M), name
    data = as_json(run, "--compare", "all", "-p", "4", "-m", "8")
    assert [entry["schedule"] for entry in data["schedules"]] == list(SCHEDULES)
    for entry in data["schedules"]:
        if "refusal" not in entry:
            assert entry["speed_up_makespan"] == pytest.approx(33 / entry["makespan"])
            assert entry["speed_up_span"] == pytest.approx(33 / entry["longest_span"])


def test_names_may_stand_apart_or_with_commas(run: Any) -> None:
    names = list(SCHEDULES)[:2]
    sizes = ("-p", "4", "-m", "8")
    together, apart = run("--compare", ",".join(names), *sizes), run("--compare", *names, *sizes)
    assert together == apart
    assert together[0] == 0


def test_chunks_are_for_those_that_take_them(run: Any) -> None:
    data = as_json(run, "--compare", "all", "-p", "4", "-m", "8", "--chunks", "3")
    for entry in data["schedules"]:
        takes = SCHEDULES[entry["schedule"]].takes_chunks
        assert "refusal" not in entry
        assert (len(entry["placement"]) == 12) == takes


@pytest.mark.skipif(
    not {"interleaved", "zb", "zb-v"} <= set(SCHEDULES), reason="not all are registered"
)
def test_the_comparison_explains_a_report_of_four_schedules() -> None:
    # sail-sg/zero-bubble-pipeline-parallelism issue 21, 6.2B on 8 ranks: 1F1B 55, interleaved 66,
    # ZB-2P 67, ZB-V 64 samples/s in 48, 57, 79 and 53 GB. The order of memory, the clear gain of
    # all three over 1F1B, and that interleaved keeps up with ZB-V, must come out.
    sizes = {"num_ranks": 8, "num_microbatches": 64, "costs": PAPER_COSTS}
    chunks = 4  # of 32 layers on 8 ranks, as that user could choose
    interleaved = Question(**sizes, num_chunks=chunks).answer("interleaved")
    two_p = Question(**sizes, memory_limits=(16.0,) * 8).answer("zb")
    basic, v = Question(**sizes).answer("1f1b"), Question(**sizes).answer("zb-v")
    for timeline in (interleaved, two_p, v):
        assert basic.makespan / timeline.makespan > 1.05
    assert interleaved.makespan / v.makespan < 1.02
    peaks = [max(t.peaks) for t in (basic, v, interleaved, two_p)]
    assert peaks == sorted(peaks)
    assert sum(interleaved.messages_sent) > sum(v.messages_sent) > sum(basic.messages_sent)


# ---- refusals --------------------------------------------------------------

PLAIN = ("--schedule", "1f1b", "-p", "4", "-m", "8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "one of the arguments --schedule --plan --validate --compare is required"),
        (("--schedule", "1f1b", "-m", "8"), "--schedule needs -p"),
        (("--compare", "all", "-p", "4"), "--compare needs -m"),
        (("--schedule", "nope", "-p", "4", "-m", "8"), "no schedule is named 'nope'; choose from"),
        (("--compare", "nope", "-p", "4", "-m", "8"), "--compare nope: no such schedule; choose"),
        (("--schedule", "1f1b", "-p", "0", "-m", "8"), "-p/--ranks: '0' is not a whole number"),
        (("--schedule", "1f1b", "-p", "4", "-m", "x"), "'x' is not a whole number of 1 or more"),
        ((*PLAIN, "--costs-us", "1,2,3"), "--costs-us: '1,2,3' is not 4 numbers with commas"),
        ((*PLAIN, "--costs-us", "1,2,3,-1"), "'1,2,3,-1' has a number that is not 0 or more"),
        ((*PLAIN, "--costs-us", "0,2,3,1"), "--costs-us has 0 for F; a forward takes time"),
        ((*PLAIN, "--costs", "no.json"), "costs file no.json cannot be read: No such file"),
        ((*PLAIN, "--costs", "a.json", "--costs-us", "1,1,1,1"), "not allowed with argument"),
        ((*PLAIN, "--memory", "1"), "--memory: '1' is not 2 numbers with commas between"),
        ((*PLAIN, "--memory-limit", "4,4"), "--memory-limit has 2 numbers for 4 ranks; give one"),
        ((*PLAIN, "--memory-limit", "3"), "--schedule 1f1b: 1f1b needs 4 of activation memory"),
        ((*PLAIN, "--chunks", "2"), "--chunks 2 has no effect on 1f1b; leave it out"),
        ((*PLAIN, "--against", "1f1b"), "--against is shown in the page that --html writes"),
        ((*PLAIN, "--measured", "t.json"), "--measured is shown in the page that --html writes"),
        ((*PLAIN, "--measured-iteration", "1"), "is about the trace of --measured"),
        ((*PLAIN, "--html", "x", "--against", "no"), "--against no is neither a file nor a sched"),
        ((*PLAIN, "--svg", "no/such/folder.svg"), "--svg no/such/folder.svg cannot be written"),
        ((*PLAIN, "--sched", "x"), "unrecognized arguments: --sched x"),
        (("--validate", "no.plan"), "no.plan cannot be read: No such file"),
        (("--validate", "no.plan", "--svg", "x"), "--svg needs --schedule or --plan"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    run: Any, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, error = run(*words)
    assert status == 2
    assert message in error
    assert error.startswith("plan_schedule.py: ")
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_differ_from_the_plan_are_refused(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.plan"
    run("--schedule", "1f1b", "-p", "2", "-m", "3", "--save", str(path))
    status, _, error = run("--plan", str(path), "-p", "3")
    assert (status, error) == (2, "plan_schedule.py: -p 3 is given, but the plan has 2\n")
    page = str(tmp_path / "x.html")
    status, _, error = run(*PLAIN, "--html", page, "--against", str(path))
    assert status == 2
    assert "has p = 2, m = 3, but the first plan has p = 4, m = 8; compare equal sizes" in error
    status, _, error = run("--plan", str(path), "--chunks", "2")
    assert "--chunks 2 is for planning" in error


def test_memory_is_given_once(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    lists = ("forward", "input_grad", "weight_grad", "held_f_to_b")
    path.write_text(json.dumps({name: [1.0] * 4 for name in lists}))
    status, _, error = run(*PLAIN, "--costs", str(path), "--memory", "1,1")
    assert status == 2
    assert "--memory is given, and" in error
    assert "has held_f_to_b; keep one" in error


def test_the_script_runs_alone_and_explains_itself() -> None:
    def result(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOL), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    help_text = result("--help")
    assert help_text.returncode == 0
    for name in SCHEDULES:
        assert f"  {name} " in help_text.stdout
    refused = result("--schedule", "1f1b")
    assert (refused.returncode, refused.stderr) == (2, "plan_schedule.py: --schedule needs -p\n")


def test_every_command_of_the_help_is_understood() -> None:
    commands = re.findall(r"^    python tools/plan_schedule\.py (.*)$", tool.__doc__, re.M)
    assert len(commands) >= 6
    for command in commands:
        options = tool.parse_options(command.split())
        tool.check_combinations(options)


def test_the_costs_in_the_help_can_be_loaded(run: Any, tmp_path: Path) -> None:
    match = re.search(r'^    (\{"forward".*?\}\})$', tool.__doc__, re.M | re.S)
    assert match is not None
    (tmp_path / "costs.json").write_text(match[1])
    data = as_json(run, *PLAIN, "--costs", str(tmp_path / "costs.json"))
    assert data["costs"]["forward"] == [21.0, 18.0, 18.0, 24.0]
    assert data["placement"] == [list(slot) for slot in Placement.plain(4).slots]
