"""Command line -> RunConfig: derived values, notices, errors, namespace, checkpoint arguments."""

import json
import pathlib
import shlex
import subprocess
import sys

import pytest
import torch

from megatron.training import arguments, rules
from megatron.training.arguments import (
    REMOVED,
    RENAMED,
    parse_args,
    parse_run,
    read_run,
    validate_args,
)
from megatron.training.config import ConfigError

ROOT = pathlib.Path(__file__).parents[3]
BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data "
)
# The fork's example script at 8 pipeline ranks and 2 tensor ranks, with 22 layers.
FORK = (
    "--num-layers 22 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
    "--max-position-embeddings 8192 --group-query-attention --num-query-groups 8 "
    "--micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 8 --train-samples 146484375 --lr-decay-samples 126953125 "
    "--lr-warmup-samples 183105 --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --log-interval 10 "
    "--eval-iters 40 --eval-interval 10000 --exit-interval 1000 "
    "--data-path /data/c4_text_document --tokenizer-type GPTSentencePieceTokenizer "
    "--tokenizer-model /data/t.model --split 98,2,0 --clip-grad 8.0 --weight-decay 0.1 "
    "--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --no-barrier-with-level-1-timing "
    "--untie-embeddings-and-output-weights --use-legacy-models --sequence-parallel "
    "--use-flash-attn --transformer-impl local --use-distributed-optimizer --enable-zb-runtime "
    "--no-create-attention-mask-in-dataloader --profile-ranks 0 1 2 3 --fp16 "
    "--allow-padding-num-layers "
)


def run_of(text, world_size=1, base=BASE, **options):
    return read_run(shlex.split(base + text), world_size=world_size, **options)[0]


def problems_of(text, world_size=1, base=BASE, **options):
    with pytest.raises(ConfigError) as caught:
        read_run(shlex.split(base + text), world_size=world_size, **options)
    return caught.value.messages


@pytest.fixture
def later_version(monkeypatch):
    """Nothing is refused for not being there yet."""
    monkeypatch.setattr(rules, "NOT_YET", ())


# Derived values


@pytest.mark.parametrize(
    ("hidden", "flags", "expected"),
    [
        (4096, "--swiglu", 10880),
        (5120, "--swiglu", 13632),
        (8192, "--swiglu", 21824),
        (4096, "", 16384),
        (4096, "--swiglu --ffn-hidden-size 11008", 11008),
    ],
)
def test_mlp_width(hidden, flags, expected):
    run = run_of(f"--hidden-size {hidden} --num-attention-heads 32 {flags}")
    assert run.ffn_hidden_size == expected


def test_model_values_that_follow():
    run = run_of("--hidden-size 64 --num-attention-heads 4")
    assert (run.kv_channels, run.num_query_groups, run.model.num_query_groups) == (16, None, 1)
    assert run.add_qkv_bias and run.bias_gelu_fusion and not run.apply_rope_fusion
    assert run.num_experts is None and run.recompute_granularity is None
    run = run_of(
        "--group-query-attention --num-query-groups 2 --use-rotary-position-embeddings "
        "--no-position-embedding --disable-bias-linear --swiglu --use-flash-attn --num-experts 0 "
        "--apply-query-key-layer-scaling --recompute-activations --kv-channels 8"
    )
    assert (run.kv_channels, run.num_query_groups) == (8, 2)
    assert run.position_embedding_type == "rope" and run.apply_rope_fusion
    assert not run.add_qkv_bias and not run.bias_gelu_fusion and run.fusion.bias_swiglu_fusion
    assert run.attention_backend == "flash" and run.attention_softmax_in_fp32
    assert run.num_experts is None
    assert (run.recompute_granularity, run.recompute_modules) == ("selective", ("core_attn",))
    assert run.model.attention_softmax_in_fp32 is False  # what the user wrote stays


@pytest.mark.parametrize(
    ("flags", "dtype", "fp32_grads", "check_nan"),
    [
        ("", "float32", False, True),
        ("--bf16", "bfloat16", True, True),
        ("--fp16", "float16", False, False),
        ("--fp16 --loss-scale 0", "float16", False, False),
        ("--fp16 --loss-scale 1024", "float16", False, True),
        ("--bf16 --no-check-for-nan-in-loss-and-grad", "bfloat16", True, False),
    ],
)
def test_precision(flags, dtype, fp32_grads, check_nan):
    run = run_of(flags)
    assert run.params_dtype == dtype
    assert run.accumulate_allreduce_grads_in_fp32 is fp32_grads
    assert run.check_for_nan_in_loss_and_grad is check_nan


def test_ranks_and_micro_batches():
    run = run_of("--pipeline-model-parallel-size 4 --global-batch-size 64", world_size=8)
    assert (run.data_parallel_size, run.num_microbatches) == (2, 32)
    assert run.stage_layers == (2, 2, 2, 2)
    assert run.sizes.groups("pp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    swapped = run_of("--pipeline-model-parallel-size 4 --use-tp-pp-dp-mapping", world_size=8)
    assert swapped.sizes.groups("pp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert swapped.global_batch_size == 2
    calculator = run.build_num_microbatches_calculator()
    assert calculator is not run.build_num_microbatches_calculator()
    assert calculator.get() == 32


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        (
            "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
            (1, 3, 3, 1),
        ),
        ("--num-layers-per-stage 3 2 2 1", (3, 2, 2, 1)),
        ("--pipeline-model-parallel-layout Et*3|tt|tt|tL", (3, 2, 2, 1)),
        ("--num-layers 6 --allow-padding-num-layers", (1, 2, 2, 1)),
        ("--num-layers 7 --account-for-loss-in-pipeline-split", (2, 2, 2, 1)),
        ("--num-layers 9 --standalone-embedding-stage", (0, 3, 3, 3)),
    ],
)
def test_layers_of_stages(flags, layers):
    run = run_of(f"--pipeline-model-parallel-size 4 {flags}", world_size=4)
    assert run.stage_layers == layers
    assert f"layers per stage: {' '.join(map(str, layers))}" in run.notices


def test_lengths_in_iterations():
    run = run_of(
        "--train-iters 1000 --global-batch-size 8 --lr-decay-iters 800 --lr-warmup-iters 100 "
        "--lr-decay-style WSD --lr-wsd-decay-iters 50"
    )
    assert (run.train_iters, run.lr_decay_iters, run.lr_decay_samples) == (1000, 800, None)
    assert (run.lr_decay_steps, run.lr_warmup_steps, run.wsd_decay_steps) == (6400, 800, 400)
    assert run.wd_incr_steps == 8000
    assert (run.start_weight_decay, run.end_weight_decay) == (0.01, 0.01)
    assert run_of("--train-iters 1000").lr_decay_iters == 1000
    assert run_of("--train-iters 1000 --lr-warmup-fraction 0.1").lr_warmup_steps == 100


def test_lengths_in_samples():
    base = BASE.replace("--train-iters 10", "--train-samples 1000")
    run = run_of("--global-batch-size 64 --lr-warmup-samples 100", base=base)
    assert run.train_iters == 15  # 1000 // 64
    assert (run.lr_decay_iters, run.lr_decay_samples, run.lr_decay_steps) == (None, 1000, 1000)
    assert (run.lr_warmup_steps, run.wd_incr_steps) == (100, 1000)
    ramp = run_of("--global-batch-size 64 --rampup-batch-size 16 16 96", base=base)
    # Batches 16 16 32 48 make 112, then (1000 - 112) // 64 = 13 more.
    assert ramp.train_iters == 17


def test_weight_decay_schedule():
    run = run_of(
        "--weight-decay-incr-style cosine --start-weight-decay 0.01 --end-weight-decay 0.1"
    )
    assert (run.start_weight_decay, run.end_weight_decay) == (0.01, 0.1)


def test_device_and_backend():
    auto, gloo = run_of("").parallel, run_of("--distributed-backend gloo").parallel
    assert (auto.device_type(False), auto.backend(False)) == ("cpu", "gloo")
    assert (auto.device_type(True), auto.backend(True)) == ("cuda", "nccl")
    assert (gloo.device_type(True), gloo.backend(True)) == ("cpu", "gloo")
    cuda = run_of("--device cuda --distributed-backend gloo").parallel
    assert (cuda.device_type(True), cuda.backend(True)) == ("cuda", "gloo")
    with pytest.raises(ValueError, match="--device cuda: no CUDA device"):
        cuda.device_type(False)
    with pytest.raises(ValueError, match="--distributed-backend nccl needs a CUDA device"):
        run_of("--distributed-backend nccl").parallel.backend(False)
    assert "--distributed-backend nccl does not work with --device cpu; use gloo" in problems_of(
        "--distributed-backend nccl --device cpu"
    )


def test_split_with_literal_quotes_is_passed_on():
    base = BASE.replace("--mock-data", "--data-path some_text_document")
    assert run_of("--split \"'99,1,0'\"", base=base).data.split == "'99,1,0'"


# Schedules: one switch, and the fork's spellings of it


@pytest.mark.parametrize(
    ("flags", "schedule", "chunks"),
    [
        ("", "1f1b", None),
        ("--pipeline-schedule 1f1b", "1f1b", None),
        ("--enable-zero-bubble", "zb", None),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 8", "zb", None),
        ("--zero-bubble-v-schedule", "zb-v", 2),
        ("--enable-zero-bubble --zero-bubble-v-schedule", "zb-v", 2),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup half", "v-half", 2),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup min", "v-min", 2),
        ("--enable-1f1b-v", "1f1b-v", 2),
        ("--pipeline-schedule zb-v --zero-bubble-v-schedule", "zb-v", 2),
        ("--num-layers-per-virtual-pipeline-stage 1", "interleaved", 2),
        ("--num-layers-per-virtual-pipeline-stage 2", "1f1b", None),
        ("--num-virtual-stages-per-pipeline-rank 2", "interleaved", 2),
        ("--num-virtual-stages-per-pipeline-rank 1", "1f1b", None),
        ("--pipeline-model-parallel-layout Et|(t|)*6tL", "interleaved", 2),
        (
            "--pipeline-schedule interleaved --num-layers-per-stage 1 1 1 1 1 1 1 1",
            "interleaved",
            2,
        ),
    ],
)
def test_schedule_names(later_version, flags, schedule, chunks):
    run = run_of(f"--pipeline-model-parallel-size 4 {flags}", world_size=4)
    assert run.pipeline_schedule == schedule
    assert run.virtual_pipeline_model_parallel_size == chunks
    assert run.placement.num_stages == 4 * (chunks or 1)
    assert run.stage_layers == (8 // run.placement.num_stages,) * run.placement.num_stages
    assert run.overlap_p2p_comm is (chunks is not None)


@pytest.mark.parametrize(
    ("flags", "limit", "notice"),
    [
        ("--enable-zero-bubble", "auto", None),
        ("--enable-zero-bubble", "8", None),
        ("--zero-bubble-v-schedule", "3.5", None),
        ("--zero-bubble-v-schedule", "16", "zb-v takes 4 micro-batches in flight by itself"),
        ("--pipeline-schedule v-half", "2", None),
        ("--pipeline-schedule v-half", "3.5", "v-half takes 3 micro-batches in flight by itself"),
        ("--pipeline-schedule zb-h1", "3", "the order of zb-h1 is not searched for a limit"),
    ],
)
def test_limit_of_micro_batches_in_flight(flags, limit, notice):
    flag = f"--zero-bubble-max-pending-backward {limit}"
    run = run_of(f"--pipeline-model-parallel-size 4 {flags} {flag}", world_size=4)
    said = [text for text in run.notices if text.startswith("--zero-bubble-max-pending-backward")]
    assert said == ([] if notice is None else [f"{flag} has no effect: {notice}"])
    if notice is None:
        assert run.pending_backward_limit == (None if limit == "auto" else float(limit))


def test_one_rank_runs_without_a_pipeline(later_version):
    for flags, name in (("--enable-zero-bubble", "zb"), ("--zero-bubble-v-schedule", "zb-v")):
        run = run_of(flags)
        assert run.pipeline_schedule == "1f1b" and run.placement.num_stages == 1
        notice = f"--pipeline-model-parallel-size is 1, so {name} runs as a plain 1f1b"
        assert any(notice in text for text in run.notices)


@pytest.mark.parametrize(
    ("flags", "schedule", "layers"),
    [
        ("", "1f1b", (2, 3, 3, 3, 3, 3, 3, 2)),
        (
            "--enable-zero-bubble --zero-bubble-pipeline-timers-start-iter 100 "
            "--zero-bubble-pipeline-timers-end-iter 110 --zero-bubble-max-pending-backward 16 "
            "--enable-optimizer-post-validation",
            "zb",
            (2, 3, 3, 3, 3, 3, 3, 2),
        ),
        (
            "--enable-zero-bubble --zero-bubble-v-schedule --enable-optimizer-post-validation "
            "--enable-exactly-numeric-match --attention-dropout 0.0 --hidden-dropout 0.0 "
            "--num-layers 32",
            "zb-v",
            (2,) * 16,
        ),
        ("--num-layers-per-virtual-pipeline-stage 1 --num-layers 16", "interleaved", (1,) * 16),
    ],
)
def test_script_of_the_fork(later_version, flags, schedule, layers):
    run = run_of(flags, world_size=32, base=FORK)
    assert (run.pipeline_schedule, run.stage_layers) == (schedule, layers)
    assert (run.data_parallel_size, run.num_microbatches) == (2, 32)
    assert run.sequence_parallel and run.num_query_groups == 8
    assert run.train_iters == 146484375 // 64
    assert run.lr_warmup_steps == 183105 and run.lr_decay_steps == 126953125
    assert run.profiling.profile_ranks == (0, 1, 2, 3)


GPT3 = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536 "
    "--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 "
    "--init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine "
    "--min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path d "
    "--vocab-file v.json --merge-file m.txt --split 949,50,1 --log-interval 100 "
    "--save-interval 10000 --eval-interval 1000 --save c --load c --eval-iters 10 "
    "--tensorboard-dir t "
)
LLAMA_LIKE = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --position-embedding-type rope "
    "--rotary-base 1000000 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --bf16 --micro-batch-size 1 --global-batch-size 128 "
    "--train-iters 100 --lr 1e-4 "
)


@pytest.mark.parametrize(
    ("change", "notice"),
    [
        ("--rampup-batch-size 16 16 5859375", "--rampup-batch-size 16 16 5859375 with"),
        (
            "--attention-backend auto --step-batch-size-schedule "
            "'0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536'",
            "--step-batch-size-schedule with --global-batch-size 1536",
        ),
    ],
)
def test_published_gpt3_scripts(later_version, change, notice):
    """Both collide with the parser of the Megatron they come with; here the batch grows."""
    run = run_of(change, world_size=1024, base=GPT3)
    assert (run.data_parallel_size, run.stage_layers) == (8, (6,) * 16)
    assert (run.global_batch_size, run.num_microbatches, run.ffn_hidden_size) == (1536, 192, 49152)
    assert (run.batch_sizes.at(0), run.batch_sizes.final) == (16, 1536)
    assert any(notice in text for text in run.notices)
    assert (run.lr_decay_steps, run.params_dtype) == (430000 * 1536, "float16")


def test_published_llama3_script():
    run = run_of(
        "--seq-length 8192 --max-position-embeddings 8192 --split \"'99,1,0'\" --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 128256 --pipeline-model-parallel-size 4",
        world_size=8,
        base=LLAMA_LIKE,
    )
    assert (run.num_query_groups, run.kv_channels, run.ffn_hidden_size) == (8, 128, 14336)
    assert (run.num_microbatches, run.data.split) == (64, "'99,1,0'")
    messages = problems_of("--fp8-format hybrid", base=LLAMA_LIKE)
    assert "--fp8-format hybrid is refused: fp8 is not supported; use --bf16" in messages


def test_published_mixtral_script(later_version):
    run = run_of(
        "--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 "
        "--expert-model-parallel-size 8 --seq-length 4096 --max-position-embeddings 32768",
        world_size=32,
        base=LLAMA_LIKE,
    )
    assert (run.num_experts, run.data_parallel_size, run.stage_layers) == (8, 8, (8,) * 4)
    assert run.unused["moe_aux_loss_coeff"] == [0.01]


# Notices


@pytest.mark.parametrize(
    ("flags", "notice"),
    [
        ("", "setting global batch size to 1"),
        ("--fp16", "using torch.float16 for parameters ..."),
        ("--bf16", "accumulate and all-reduce gradients in fp32 for bfloat16 data type."),
        (
            "--sequence-parallel",
            "--sequence-parallel has no effect: --tensor-model-parallel-size is",
        ),
        ("--use-mcore-models", "--use-mcore-models has no effect: core models are the only ones"),
        (
            "--global-batch-size 64 --rampup-batch-size 16 16 96",
            "--rampup-batch-size 16 16 96 with",
        ),
        (
            '--global-batch-size 64 --step-batch-size-schedule "0:16 1K:64"',
            "the schedule is applied and the size taken as its last value",
        ),
        ("--zero-bubble-v-schedule-mem-setup half", "has no effect without --zero-bubble-v-sch"),
        ("--bf16 --loss-scale 8", "--loss-scale 8.0 has no effect without --fp16"),
        ("--encoder-num-layers 8", "--encoder-num-layers is the older spelling of --num-layers"),
    ],
)
def test_notices(flags, notice):
    base = BASE.replace("--num-layers 8 ", "") if "encoder" in flags else BASE
    notices = run_of(flags, base=base).notices
    assert sum(notice in text for text in notices) == 1
    if flags:
        assert not any(notice in text for text in run_of("--global-batch-size 4").notices)


def test_no_notice_of_what_was_not_asked():
    assert run_of("--global-batch-size 4").notices == ("using torch.float32 for parameters ...",)


def test_notice_of_data_that_is_not_named():
    base = BASE.replace("--mock-data", "")
    assert any("would be synthetic" in text for text in run_of("", base=base).notices)
    notices = run_of("--data-path a", base=base).notices
    assert "--split is not given: 969, 30, 1 applies" in notices


# Errors


def test_all_problems_at_once():
    messages = problems_of(
        "--pipeline-model-parallel-size 4 --num-layers 30 --fp16 --bf16 --nmu-layers 3 "
        "--batch-size 3 --lr-decay-style flat --min-lr --hysteresis two --openai-gelu "
        "--context-parallel-size 2 --mask-prob 0.2",
        world_size=8,
    )
    assert sorted(m.split(";")[0] for m in messages) == [
        "--batch-size is no longer a flag",
        "--context-parallel-size 2 is not available yet in this version",
        "--fp16 and --bf16 exclude each other",
        "--hysteresis: 'two' is not a whole number",
        "--lr-decay-style: 'flat' is not one of constant, linear, cosine, inverse-square-root, WSD",
        "--min-lr: expected one argument",
        "--nmu-layers is not a known flag",
        "--num-layers 30 does not divide into 4 stages",
        "--openai-gelu is refused: only the exact GELU exists",
        # --seq-length 32 is a multiple of 2 x 2, so nothing more about --context-parallel-size.
    ]


def test_message_of_each_kind():
    assert problems_of("--nmu-layers 3") == (
        "--nmu-layers is not a known flag; did you mean --num-layers?",
    )
    assert problems_of("--no-such-thing-at-all") == (
        "--no-such-thing-at-all is not a known flag; see --help for all flags",
    )
    assert problems_of("--seed 3 4") == (
        "'4' belongs to no flag; put it after its flag or remove it",
    )
    assert problems_of("--num-layers") == ("--num-layers: expected one argument",)
    assert problems_of("--num-lay 3")[0].startswith("--num-lay is not a known flag; did you mean")
    assert problems_of("--rampup-batch-size 16 16") == (
        "--rampup-batch-size: expected 3 arguments",
    )
    assert problems_of("--fp16=1")[0].startswith("--fp16: ")


def test_missing_flags_are_all_named():
    messages = problems_of("", base="--seq-length long --num-layers 2 ")
    required = ["--hidden-size", "--num-attention-heads", "--max-position-embeddings"]
    assert messages[:5] == (
        "--seq-length: 'long' is not a whole number",
        *(f"{flag} is required; add it" for flag in [*required, "--micro-batch-size"]),
    )
    assert messages[5:] == (
        "the length of the run is not given; add --train-iters or --train-samples",
        "--lr is not given; training needs a learning rate",
    )


@pytest.mark.parametrize(("old", "new"), REMOVED.items())
def test_removed_flags_point_to_their_successors(old, new):
    value = "" if old == "--checkpoint-activations" else "2"
    assert problems_of(f"{old} {value}") == (f"{old} is no longer a flag; use {new}",)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_old_spellings(old, new):
    value = "here" if "path" in old else "8"
    both = problems_of(f"{old} {value} {new} {value}")
    assert f"{old} and {new} are the same flag; give one" in both
    base = BASE.replace(f"{new} 8 ", "").replace(f"{new} 32 ", "")
    if "path" in old:
        assert problems_of(f"{old}={value}", base=base)[0].startswith(f"{new} {value} is refused")
    else:
        run = run_of(f"{old}={value}", base=base)
        assert f"{old} is the older spelling of {new}" in run.notices


def test_unknown_flags_can_be_ignored():
    run = run_of("--not-ours 3 4 --seed 5", ignore_unknown_args=True)
    assert run.training.seed == 5


def test_abbreviations_are_not_accepted():
    assert "--micro-batch 2" not in " ".join(problems_of("--micro-batch 2"))
    assert run_of("").training.micro_batch_size == 1


def test_last_of_two_values_wins():
    assert run_of("--seed 1 --seed 2").training.seed == 2


def test_exit_status_and_one_voice(capsys):
    for rank, said in ((0, True), (1, False)):
        with pytest.raises(SystemExit) as caught:
            parse_run(shlex.split(BASE + "--fp16 --bf16 --seed 0"), world_size=2, rank=rank)
        assert caught.value.code == 2
        output = capsys.readouterr()
        assert output.out == ""
        if said:
            assert output.err == (
                "2 problems in the command line:\n"
                "  --seed 0 is too small; give at least 1\n"
                "  --fp16 and --bf16 exclude each other; give one\n"
            )
        else:
            assert output.err == ""


# Programs' own flags and defaults; Megatron's entry points


def extra(parser):
    group = parser.add_argument_group("mine")
    group.add_argument("--reward-scale", type=float, default=2.0)
    group.add_argument("--reward-name", required=True)


def test_extra_flags_reach_the_namespace():
    argv = shlex.split(BASE + "--reward-name gold --reward-scale 3")
    run, namespace = read_run(argv, world_size=1, extra_args_provider=extra)
    assert (namespace.reward_scale, namespace.reward_name) == (3.0, "gold")
    assert not hasattr(run, "reward_scale")
    messages = problems_of("--reward-scale much --reward-name gold", extra_args_provider=extra)
    assert messages == ("--reward-scale: invalid float value: 'much'",)
    assert "--reward-name" in problems_of("", extra_args_provider=extra)[0]


def test_defaults_of_a_program():
    defaults = {"tokenizer_type": "GPT2BPETokenizer", "dataloader_type": "cyclic", "seed": 7}
    run = run_of("--seed 9", args_defaults=defaults)
    assert (run.tokenizer.tokenizer_type, run.dataloader_type) == ("GPT2BPETokenizer", "cyclic")
    assert run.training.seed == 9
    assert "seed is 9, not the program's default 7" in run.notices
    # Stated, even if it is the flag's own default.
    assert run_of("--seed 1234", args_defaults=defaults).training.seed == 1234


def test_megatron_entry_points(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    args = parse_args(argv=shlex.split(BASE + "--pipeline-model-parallel-size 2"))
    assert (args.world_size, args.rank, args.data_parallel_size) == (4, 3, 2)
    assert validate_args(args) is args
    with pytest.raises(ValueError, match="give args_defaults to parse_args"):
        validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *shlex.split(BASE)])
    assert parse_args().num_layers == 8


def test_flat_namespace():
    _, args = read_run(
        shlex.split(
            BASE + "--bf16 --norm-epsilon 1e-6 --apply-layernorm-1p --swiglu --rank-free-flag 1 "
            "--pipeline-model-parallel-size 2 --data-cache-path c"
        ),
        world_size=4,
        rank=1,
        ignore_unknown_args=True,
    )
    assert args.layernorm_epsilon == args.norm_epsilon == 1e-6
    assert args.layernorm_zero_centered_gamma is args.apply_layernorm_1p is True
    assert args.fp8 is args.fp8_format is None
    assert args.params_dtype is torch.bfloat16
    assert args.accumulate_allreduce_grads_in_fp32 is True
    assert (args.world_size, args.rank, args.data_parallel_size) == (4, 1, 2)
    assert args.transformer_pipeline_model_parallel_size == 2
    assert args.virtual_pipeline_model_parallel_size is None
    assert (args.encoder_num_layers, args.encoder_seq_length) == (8, 32)
    assert (args.ffn_hidden_size, args.kv_channels, args.global_batch_size) == (128, 16, 2)
    assert (args.consumed_train_samples, args.consumed_valid_samples) == (0, 0)
    assert args.recompute_modules == ["core_attn"] and args.iterations_to_skip == []


# --use-checkpoint-args


def test_shape_from_a_checkpoint():
    stored = {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 8,
        "seq_length": 64,
        "max_position_embeddings": 64,
        "swiglu": True,
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": True,
        "norm_epsilon": 1e-3,
        "tensor_model_parallel_size": 8,
        "tokenizer_model": "/old/place/tokenizer.model",
        "kv_channels": None,
    }
    asked = []

    def read(namespace):
        asked.append(namespace.load)
        return stored

    base = "--micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data --load here "
    argv = "--use-checkpoint-args --seq-length 32 --normalization LayerNorm "
    run = run_of(argv, base=base, read_checkpoint_args=read)
    assert asked == ["here"]
    assert (run.model.num_layers, run.model.hidden_size, run.kv_channels) == (4, 128, 16)
    assert run.model.seq_length == 32  # stated, and of the kind that only fills gaps
    assert run.model.normalization == "RMSNorm"  # taken from the checkpoint in any case
    assert run.model.swiglu and run.model.apply_layernorm_1p
    assert run.model.norm_epsilon == 1e-5 and run.parallel.tensor_model_parallel_size == 1
    assert run.tokenizer.tokenizer_model == "/old/place/tokenizer.model"
    assert "num_layers is 4 from the checkpoint (was none)" in run.notices
    assert "normalization is RMSNorm from the checkpoint (was LayerNorm)" in run.notices

    own = "--no-use-tokenizer-model-from-checkpoint-args"
    run = run_of(argv + own, base=base, read_checkpoint_args=read)
    assert run.tokenizer.tokenizer_model is None
    run_of("--load here", read_checkpoint_args=lambda _: pytest.fail("not asked for"))
    assert problems_of("--use-checkpoint-args --load here") == (
        "--use-checkpoint-args: this program reads none; give the model flags",
    )


def test_help_is_quick_and_complete():
    code = "import sys; from megatron.training.arguments import parse_run; parse_run(world_size=1)"
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("--") > 400
    assert "Megatron-LM Arguments" in done.stdout


def test_run_config_is_data_for_a_log():
    """Groups hold plain values only, so a run can be written out."""
    run = run_of("--num-layers-per-stage 8 --profile-ranks 0 1")
    groups = {name: vars(getattr(run, name)) for name in arguments.GROUPS}
    assert json.loads(json.dumps(groups))["pipeline"]["num_layers_per_stage"] == [8]
