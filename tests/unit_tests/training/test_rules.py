"""Every rule, passing and failing; every refusal names the flag, its value and the mend."""

import shlex
import types

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from megatron.training import rules
from megatron.training.arguments import NOT_YET, REFUSED, read_run
from megatron.training.config import ConfigError

BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data "
)
BY_SAMPLES = BASE.replace("--train-iters 10", "--train-samples 100")
PIPELINE = "--pipeline-model-parallel-size 4 "


def read(text, world_size=4, base=BASE):
    return read_run(shlex.split(base + text), world_size=world_size)[0]


def refused(text, world_size=4, base=BASE):
    with pytest.raises(ConfigError) as caught:
        read(text, world_size, base)
    return caught.value.messages


@pytest.fixture
def later_version(monkeypatch):
    """Every kind of schedule exists, and nothing is refused for not being there yet."""
    like = SCHEDULES["1f1b"]
    kinds = {"interleaved": ("looped", False), "zb": ("plain", True), "zb-v": ("v", True)}
    for name, (placement, splits) in kinds.items():
        schedule = types.SimpleNamespace(
            planner=like.planner, placement=placement, splits_backward=splits, summary=""
        )
        monkeypatch.setitem(SCHEDULES, name, schedule)
    monkeypatch.setattr(rules, "NOT_YET", ())


# (rule, a command line that keeps it, one that breaks it, what is then said)
CASES = [
    (
        rules.ranks_fill_the_world,
        PIPELINE,
        "--pipeline-model-parallel-size 3 --num-layers 9",
        "--pipeline-model-parallel-size 3 = 3 does not divide the world size 4; start a multiple "
        "of 3 processes or change a size",
    ),
    (
        rules.tensor_ranks_divide_widths,
        "--tensor-model-parallel-size 4",
        "--tensor-model-parallel-size 4 --num-attention-heads 2",
        "--num-attention-heads 2 is not a multiple of --tensor-model-parallel-size 4; change one",
    ),
    (
        rules.tensor_ranks_divide_widths,
        "--tensor-model-parallel-size 4 --ffn-hidden-size 20",
        "--tensor-model-parallel-size 4 --ffn-hidden-size 10",
        "the MLP width 10 (--ffn-hidden-size) is not a multiple of --tensor-model-parallel-size 4",
    ),
    (
        rules.tensor_ranks_divide_widths,
        "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2",
        "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 6 "
        "--num-attention-heads 12 --hidden-size 96",
        "--num-query-groups 6 and --tensor-model-parallel-size 4: one must divide the other",
    ),
    (
        rules.sequence_divides,
        "--context-parallel-size 4",
        "--context-parallel-size 4 --seq-length 28",
        "--seq-length 28 is not a multiple of 2 x --context-parallel-size 4 = 8",
    ),
    (
        rules.sequence_divides,
        "--sequence-parallel --tensor-model-parallel-size 4",
        "--sequence-parallel --tensor-model-parallel-size 4 --seq-length 30",
        "--seq-length 30 is not a multiple of --tensor-model-parallel-size 4, as",
    ),
    (
        rules.experts_divide,
        "--num-experts 8 --expert-model-parallel-size 4",
        "--num-experts 6 --expert-model-parallel-size 4",
        "--num-experts 6 is not a multiple of --expert-model-parallel-size 4",
    ),
    (
        rules.experts_divide,
        "--num-experts 0",
        "--num-experts 0 --expert-model-parallel-size 4",
        "--expert-model-parallel-size 4 needs --num-experts",
    ),
    (
        rules.experts_divide,
        "--num-experts 8 --tensor-model-parallel-size 2 --sequence-parallel",
        "--num-experts 8 --tensor-model-parallel-size 2",
        "--num-experts 8 with --tensor-model-parallel-size 2 needs --sequence-parallel",
    ),
    (
        rules.overlapped_gather_needs_shards,
        "--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer",
        "--overlap-param-gather --overlap-grad-reduce",
        "--overlap-param-gather needs --use-distributed-optimizer; add it",
    ),
    (
        rules.schedule_exists,
        "--pipeline-schedule zb",
        "--pipeline-schedule zb_v",
        "--pipeline-schedule zb_v is not available in this version; choose from 1f1b, ",
    ),
    (
        rules.schedule_exists,
        "--pipeline-schedule 1f1b",
        "--pipeline-schedule plans/none.txt",
        "--pipeline-schedule plans/none.txt: there is no such file",
    ),
    (
        rules.one_schedule_is_named,
        "--pipeline-schedule zb-v --zero-bubble-v-schedule",
        "--pipeline-schedule zb --zero-bubble-v-schedule",
        "--pipeline-schedule zb and --zero-bubble-v-schedule (schedule zb-v) name two schedules",
    ),
    (
        rules.chunks_are_whole,
        PIPELINE + "--pipeline-model-parallel-layout Et*2|t*2|t*2|t*2L",
        PIPELINE + "--pipeline-model-parallel-layout Et*2|t*2|t*2|t*2",
        "--pipeline-model-parallel-layout 'Et*2|t*2|t*2|t*2' must begin with the one E (embedding)",
    ),
    (
        rules.chunks_are_whole,
        PIPELINE + "--num-layers-per-virtual-pipeline-stage 1",
        PIPELINE + "--num-layers-per-virtual-pipeline-stage 1 --num-layers 40 "
        "--num-layers-per-virtual-pipeline-stage 3",
        "--num-layers 40 is not a multiple of 4 ranks x --num-layers-per-virtual-pipeline-stage 3",
    ),
    (
        rules.chunks_fit_the_schedule,
        "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-virtual-stages-per-pipeline-rank needs --pipeline-model-parallel-size above 1",
    ),
    (
        rules.chunks_fit_the_schedule,
        PIPELINE + "--zero-bubble-v-schedule",
        PIPELINE + "--zero-bubble-v-schedule --num-virtual-stages-per-pipeline-rank 2",
        "asks for 2 chunks per rank, but schedule zb-v (--zero-bubble-v-schedule) has 2 chunks",
    ),
    (
        rules.chunks_fit_the_schedule,
        PIPELINE + "--enable-zero-bubble",
        PIPELINE + "--enable-zero-bubble --num-virtual-stages-per-pipeline-rank 2",
        "asks for 2 chunks per rank, but schedule zb (--enable-zero-bubble) has 1 chunk",
    ),
    (
        rules.layers_divide,
        PIPELINE + "--num-layers 30 --allow-padding-num-layers",
        PIPELINE + "--num-layers 30",
        "--num-layers 30 does not divide into 4 stages; use 28 or 32, pass "
        "--allow-padding-num-layers, or give each stage its share with --num-layers-per-stage",
    ),
    (
        rules.layers_divide,
        PIPELINE + "--num-layers-per-stage 3 2 2 1",
        PIPELINE + "--num-layers-per-stage 3 2 2 2",
        "layers per stage 3 2 2 2 make 9, but --num-layers is 8; change one of them",
    ),
    (
        rules.layers_divide,
        "--decoder-last-pipeline-num-layers 8",
        "--decoder-last-pipeline-num-layers 2",  # with one rank this once shrank the model
        "--num-layers 8 minus 2 on the first and last rank",
    ),
    (
        rules.layers_divide,
        PIPELINE + "--zero-bubble-v-schedule",
        PIPELINE + "--zero-bubble-v-schedule --num-layers 12",
        "--num-layers 12 does not divide into 4 ranks x 2 chunks = 8 stages; use 8 or 16",
    ),
    (
        rules.microbatch_groups_fill_the_pipeline,
        PIPELINE + "--microbatch-group-size-per-virtual-pipeline-stage 4",
        PIPELINE + "--microbatch-group-size-per-virtual-pipeline-stage 3",
        "--microbatch-group-size-per-virtual-pipeline-stage 3 is below "
        "--pipeline-model-parallel-size 4; raise it to 4 or more",
    ),
    (
        rules.batch_sizes_are_readable,
        "--global-batch-size 64 --rampup-batch-size 16 16 96",
        "--global-batch-size 64 --rampup-batch-size 16 20 96",
        "--rampup-batch-size 16 20 96 does not reach the global batch size 64",
    ),
    (
        rules.batch_sizes_are_readable,
        '--global-batch-size 64 --step-batch-size-schedule "0:16 1K:64"',
        '--global-batch-size 32 --step-batch-size-schedule "0:16 1K:64"',
        "--step-batch-size-schedule ends with 64, but --global-batch-size is 32",
    ),
    (
        rules.batch_sizes_are_readable,
        "--global-batch-size 64",
        '--rampup-batch-size 16 16 96 --step-batch-size-schedule "0:16 1K:64"',
        "--rampup-batch-size and --step-batch-size-schedule both change the batch size",
    ),
    (
        rules.batches_divide,
        "--global-batch-size 24 --micro-batch-size 2",
        "--global-batch-size 20 --micro-batch-size 2",
        "--global-batch-size 20 is not a multiple of --micro-batch-size 2 x data-parallel size 4 "
        "= 8; use 16 or 24",
    ),
    (
        rules.batches_divide,
        "--global-batch-size 64 --rampup-batch-size 16 16 96",
        "--global-batch-size 64 --rampup-batch-size 16 6 96",
        "--rampup-batch-size: batch size 22 is not a multiple of --micro-batch-size 1",
    ),
    (
        rules.lengths_share_a_unit,
        "--lr-warmup-iters 5 --lr-decay-iters 10",
        "--lr-warmup-samples 5 --lr-decay-samples 10",
        "--lr-decay-samples 10, --lr-warmup-samples 5: the run is counted by --train-iters",
    ),
    (
        rules.learning_rate_is_given,
        "--skip-train",
        None,
        "--lr is not given; training needs a learning rate",
    ),
    (
        rules.warmup_ends_before_decay,
        "--lr-warmup-iters 9",
        "--lr-warmup-iters 10",
        "the warm-up of 40 samples (--lr-warmup-...) does not end before the decay at 40 samples",
    ),
    (
        rules.tail_fits_the_decay,
        "--lr-decay-style WSD --lr-wsd-decay-iters 10",
        "--lr-decay-style WSD --lr-wsd-decay-iters 11",
        "the WSD tail of 44 samples (--lr-wsd-decay-...) is longer than the decay of 40 samples",
    ),
    (
        rules.tail_fits_the_decay,
        "--lr-decay-style cosine",
        "--lr-decay-style WSD",
        "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples",
    ),
    (
        rules.fp32_residual_needs_16_bits,
        "--bf16 --fp32-residual-connection",
        "--fp32-residual-connection",
        "--fp32-residual-connection needs --fp16 or --bf16",
    ),
    (
        rules.fp16_loss_needs_fp16,
        "--fp16 --fp16-lm-cross-entropy",
        "--bf16 --fp16-lm-cross-entropy",
        "--fp16-lm-cross-entropy needs --fp16",
    ),
    (
        rules.saved_activations_can_be_sharded,
        "--distribute-saved-activations --tensor-model-parallel-size 2 --recompute-granularity "
        "full --recompute-method uniform --recompute-num-layers 1",
        "--distribute-saved-activations --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        "--distribute-saved-activations needs --tensor-model-parallel-size above 1; drop it",
    ),
    (
        rules.saved_activations_can_be_sharded,
        "--sequence-parallel --tensor-model-parallel-size 2",
        "--distribute-saved-activations --tensor-model-parallel-size 2 --sequence-parallel "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--distribute-saved-activations and --sequence-parallel exclude each other",
    ),
    (
        rules.early_step_needs_no_meeting,
        "--enable-optimizer-post-validation",
        "--enable-optimizer-post-validation --log-num-zeros-in-grad",
        "--enable-optimizer-post-validation excludes --log-num-zeros-in-grad, which makes ranks",
    ),
    (
        rules.deterministic_excludes_fused_loss,
        "--deterministic-mode",
        "--deterministic-mode --cross-entropy-loss-fusion",
        "--deterministic-mode excludes --cross-entropy-loss-fusion; drop one",
    ),
    (
        rules.progress_needs_a_directory,
        "--log-progress --save here --save-interval 5",
        "--log-progress",
        "--log-progress writes progress.txt into the --save directory; add --save",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[3][:30]}")
def test_rule(later_version, case):
    rule, keeping, breaking, said = case
    assert rule(read(keeping)) is None
    base = BASE if breaking is not None else BASE.replace("--lr 1e-3", "")
    (message,) = refused(breaking or "", base=base)
    assert said in message


def test_every_rule_has_a_case():
    assert {rule for rule, *_ in CASES} == set(rules.RULES)


def test_sample_counted_runs_refuse_iterations(later_version):
    (message,) = refused("--lr-warmup-iters 5", base=BY_SAMPLES)
    assert message.startswith("--lr-warmup-iters 5: the run is counted by --train-samples")
    assert read("--lr-warmup-samples 5", base=BY_SAMPLES).lr_warmup_steps == 5


def test_a_rule_that_rests_on_a_broken_one_is_left_out():
    messages = refused("--pipeline-model-parallel-size 3", world_size=4)
    assert [m.split(" ")[0] for m in messages] == ["--pipeline-model-parallel-size", "--num-layers"]
    assert refused("--micro-batch-size 0") == (
        "--micro-batch-size 0 is too small; give at least 1",
    )


def test_a_rule_that_fails_by_itself_is_a_fault_of_ours(monkeypatch):
    def faulty(run):
        raise ValueError("a fault")

    monkeypatch.setattr(rules, "RULES", (faulty,))
    with pytest.raises(ValueError, match="a fault"):
        read("")
    refused("--seed 0")  # there is a problem already, which may be the cause


def test_a_missing_plan_file_stops_every_rank():
    argv = shlex.split(BASE + "--pipeline-schedule none.txt")
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=r"none\.txt: there is no such file"):
            read_run(argv, world_size=4, rank=rank)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("0F0 ", "", 1), "never runs"),
        (lambda text: text.replace("rank 0: 0F0 0BW0", "rank 0: 0BW0 0F0"), "no rank can proceed"),
        (
            lambda text: text.replace("rank 0:", "rank 0: 0AR0", 1),
            "before its last weight gradient",
        ),
        (lambda text: text.replace(" 0BW0", "", 1), "forwards only"),
        (lambda text: text + "rank 1: 1F0 1BW0\n", "placement|ranks"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_at_launch(tmp_path, change, said):
    plan = tmp_path / "plan.txt"
    plan.write_text(change(one_rank_plan()))
    argv = shlex.split(BASE + f"--pipeline-schedule {plan}")
    if "rank 1" in plan.read_text():
        argv += ["--pipeline-model-parallel-size", "4"]
    with pytest.raises(ConfigError, match=said):
        read_run(argv, world_size=4, rank=1)


# Single groups


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--max-position-embeddings 16", "--max-position-embeddings 16 is below --seq-length 32"),
        ("--hidden-size 62", "--hidden-size 62 is not a multiple of --num-attention-heads 4"),
        ("--group-query-attention --num-query-groups 3", "--num-query-groups 3 does not divide"),
        ("--swiglu --squared-relu", "--swiglu and --squared-relu are two activations"),
        ("--no-position-embedding", "--no-position-embedding takes the learned position table"),
        ("--position-embedding-type yarn", "--position-embedding-type yarn is not supported"),
        (
            "--use-rotary-position-embeddings --position-embedding-type none",
            "--use-rotary-position-embeddings and --position-embedding-type none contradict",
        ),
        ("--train-samples 5", "--train-iters 10 and --train-samples 5 both state the length"),
        ("--min-lr 1", "--min-lr 1.0 is above --lr 0.001; lower it"),
        ("--lr-warmup-init 1", "--lr-warmup-init 1.0 is above --lr 0.001"),
        ("--lr-warmup-fraction .1 --lr-warmup-iters 1", "both state the warm-up; give one"),
        ("--decoupled-min-lr 1", "--decoupled-min-lr 1.0 needs --decoupled-lr"),
        ("--decoupled-lr 1 --decoupled-min-lr 2", "--decoupled-min-lr 2.0 is above --decoupled-lr"),
        (
            "--use-checkpoint-opt_param-scheduler --override-opt-param-scheduler",
            "contradict each other; give one",
        ),
        ("--start-weight-decay 1", "--start-weight-decay 1.0 differs from --weight-decay 0.01"),
        ("--weight-decay-incr-style linear", "linear needs both --start-weight-decay and"),
        (
            "--weight-decay-incr-style linear --start-weight-decay 2 --end-weight-decay 1",
            "--start-weight-decay 2.0 is above --end-weight-decay 1.0",
        ),
        ("--fp16 --bf16", "--fp16 and --bf16 exclude each other"),
        ("--overlap-param-gather", "--overlap-param-gather needs --overlap-grad-reduce"),
        (
            PIPELINE + "--num-layers-per-stage 2 2 2 2 --account-for-loss-in-pipeline-split",
            "--num-layers-per-stage and --account-for-embedding/loss-in-pipeline-split each split",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2",
            "each set the number of chunks; give one",
        ),
        ("--enable-1f1b-v --enable-zero-bubble", "excludes --enable-zero-bubble; give one"),
        ("--enable-1f1b-v --zero-bubble-v-schedule", "excludes --zero-bubble-v-schedule"),
        (
            "--enable-1f1b-v --enable-optimizer-post-validation",
            "--enable-1f1b-v excludes --enable-optimizer-post-validation",
        ),
        (
            "--enable-optimizer-post-validation --disable-optimizer-post-validation",
            "exclude each other; give one",
        ),
        (
            "--zero-bubble-pipeline-timers-start-iter 120",
            "--zero-bubble-pipeline-timers-start-iter 120 is after",
        ),
        ("--zero-bubble-max-pending-backward few", "neither a number of at least 1 nor auto"),
        ("--zero-bubble-adaptive-memory-limit-percentile 101", "101 is too large; give at most"),
        ("--recompute-granularity full", "needs --recompute-method (uniform or block) and"),
        ("--recompute-activations --recompute-method block", "only for --recompute-granularity"),
        (
            "--recompute-activations --recompute-granularity full",
            "--recompute-activations means --recompute-granularity selective, but full is given",
        ),
        (
            "--recompute-granularity full --recompute-method chunk --recompute-num-layers 1",
            "--recompute-method chunk is not supported; use uniform or block",
        ),
        ("--recompute-modules moe core_attn", "--recompute-modules moe: only core_attn and mlp"),
        ("--hidden-dropout 1", "--hidden-dropout 1 would drop everything; give less than 1"),
        (
            "--distribute-saved-activations",
            "--distribute-saved-activations needs --recompute-granularity full",
        ),
        ("--data-path a", "--data-path and --mock-data are different sources of data; give one"),
        ("--valid-data-path a", "--valid-data-path and --mock-data are different sources"),
        ("--save here", "--save here needs --save-interval; add it"),
        (
            "--save here --save-interval 4 --save-retain-interval 6",
            "--save-retain-interval 6 is not a multiple of --save-interval 4",
        ),
        ("--ckpt-format torch_dcp", "--ckpt-format torch_dcp is not supported"),
        ("--ckpt-format torch", "--ckpt-format torch is not supported; use torch_dist"),
        ("--use-checkpoint-args", "--use-checkpoint-args needs --load; add it"),
        ("--wandb-project p", "--wandb-project p needs --wandb-exp-name; add it"),
        ("--profile --profile-step-start 12", "--profile-step-start 12 is not before"),
        ("--hidden-dropout 2", "--hidden-dropout 2.0 is too large; give at most 1"),
        ("--num-layers-per-stage 4 -4", "--num-layers-per-stage -4 is too small"),
    ],
)
def test_group(later_version, flags, said):
    assert sum(said in message for message in refused(flags)) == 1


def test_group_data_split():
    base = BASE.replace("--mock-data", "--train-data-path a")
    assert refused("--split 98,1,1", base=base) == (
        "--split 98,1,1 has nothing to cut with --train-data-path; drop one",
    )
    read("--valid-data-path b --test-data-path c", base=base)
    base = BASE.replace("--mock-data", "--per-split-data-args-path a")
    assert "--per-split-data-args-path" in refused("--split 98,1,1", base=base)[0]


# What is refused, and what is not there yet


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.flag)
def test_refused_flag(row):
    value = {"on": "", "int": "3", "ints": "3", "float": "0.5"}.get(row.kind, "word")
    (message,) = refused(f"{row.flag} {value}")
    assert message == f"{row.flag}{' ' * bool(value)}{value} is refused: {row.reason}"


# One command line for each row of NOT_YET, in its order.
PLANNED = [
    "--tensor-model-parallel-size 2",
    "--context-parallel-size 2",
    "--expert-model-parallel-size 2 --num-experts 2",
    "--expert-tensor-parallel-size 2",
    "--num-experts 2",
    "--distribute-saved-activations --tensor-model-parallel-size 2 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
    "--num-seq-splits 2",
    "--cpu-offload",
]


@pytest.mark.parametrize("index", range(len(NOT_YET)))
def test_not_yet(later_version, monkeypatch, tmp_path, index):
    """With its row alone in the table the command line is refused; with an empty one it is not."""
    plan = tmp_path / "plan.txt"
    plan.write_text(one_rank_plan())
    text = PLANNED[index].replace("FILE", str(plan))
    run = read(text)
    monkeypatch.setattr(rules, "NOT_YET", NOT_YET[index : index + 1])
    (message,) = refused(text)
    flag = PLANNED[index].removeprefix(PIPELINE).split()[0]
    assert message.startswith(flag)
    assert message.endswith(f" is not available yet in this version; {NOT_YET[index].instead}")
    assert NOT_YET[index].check(read("")) is None
    assert run.rank == 0


def test_every_planned_thing_has_a_case():
    assert len(PLANNED) == len(NOT_YET)


def test_a_plan_file_brings_its_placement(later_version, tmp_path):
    plan = tmp_path / "plan.txt"
    plan.write_text(one_rank_plan())
    run = read(f"--pipeline-schedule {plan}")
    assert (run.pipeline_schedule, run.plan_file) == (str(plan), str(plan))
    assert run.stage_layers == (8,)


def one_rank_plan():
    from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
    from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import plan_schedule
    from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest

    plan: Plan = plan_schedule("1f1b", PlanRequest(num_ranks=1, num_microbatches=1))
    return plan.to_text()
