"""Flags of Megatron-LM and of the zero-bubble fork that this code base does not act on.

Each is stated once, here: `RENAMED` and `REMOVED` old spellings, `IGNORED` flags that change
nothing, `REFUSED` flags that stop the run when they are set to something other than their default.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron.training.cli import number, shown, whole_number

# Old spelling -> new one; the old one works and says so.
RENAMED = {
    "--encoder-num-layers": "--num-layers",
    "--encoder-seq-length": "--seq-length",
    "--persistent-save-interval": "--save-interval",
    "--object-storage-cache-path": "--s3-cache-path",
    "--local_rank": "--local-rank",
}

# Old spelling -> what to use; giving one is an error, as in Megatron.
REMOVED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-activations, or --recompute-granularity full with "
    "--recompute-method and --recompute-num-layers",
}


class OtherFlag(NamedTuple):
    """A flag without a config field."""

    flag: str
    kind: str  # a key of KINDS
    default: Any
    reason: str  # IGNORED: why nothing changes. REFUSED: why it cannot be, and what to use
    name: str = ""  # in the flat namespace, where it does not follow from the flag

    @property
    def dest(self) -> str:
        if self.name:
            return self.name
        return self.flag.removeprefix("--no-" if self.kind == "off" else "--").replace("-", "_")


def boolean(text: str) -> bool:
    """`true` or `false` in the usual spellings."""
    value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in value:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return value[text.lower()]


def number_or_text(text: str) -> int | str:
    """A whole number where it is one."""
    return int(text) if text.lstrip("-").isdigit() else text


KINDS: dict[str, dict[str, Any]] = {
    "on": {"action": "store_true"},
    "off": {"action": "store_false"},  # the default is True
    "yes": {"action": "store_true"},  # so is this one's
    "bool": {"type": boolean, "nargs": "?", "const": True},
    "int": {"type": whole_number},
    "float": {"type": number},
    "str": {"type": str},
    "int|str": {"type": number_or_text},
    "ints": {"type": whole_number, "nargs": "+"},
    "floats": {"type": number, "nargs": "+"},
    "strs": {"type": str, "nargs": "+"},
    "strs?": {"type": str, "nargs": "*"},
}


def on(flag: str, reason: str) -> OtherFlag:
    return OtherFlag(flag, "on", False, reason)


def off(flag: str, reason: str, name: str = "") -> OtherFlag:
    return OtherFlag(flag, "off", True, reason, name)


_KEYED = "random numbers are keyed by their place in the run, so there is no state to keep"
_MOE = "it is read only with --num-experts"
_FP8 = "it is read only with --fp8-format"
_OFFLOAD = "it is read only with --cpu-offload"
_ONE_BUCKET = "the gradients of a stage are reduced together"
_ORDER = "reductions start at the last W of a stage, on every rank alike"
_NO_SERVICE = "there is no such service here"
_BERT = "it belongs to BERT data"

IGNORED: tuple[OtherFlag, ...] = (
    on("--no-save-rng", _KEYED),
    on("--no-load-rng", _KEYED),
    on("--auto-detect-ckpt-format", "the format is always found out when loading"),
    off(
        "--no-create-attention-mask-in-dataloader",
        "attention is causal by itself; a mask is made only for --reset-attention-mask",
        "create_attention_mask_in_dataloader",
    ),
    on(
        "--tokenizer-sentencepiece-legacy",
        "SentencePieceTokenizer always finds special tokens inside text",
    ),
    OtherFlag("--empty-unused-memory-level", "int", 0, "cached device memory is used again"),
    on("--use-mcore-models", "core models are the only ones"),
    on("--use-legacy-models", "core models are the only ones"),
    OtherFlag("--onnx-safe", "bool", None, "no operation here depends on it"),
    on("--use-cpu-initialization", "initial weights are the same on every device and layout"),
    on("--init-model-with-meta-device", "each rank builds only the weights it holds"),
    OtherFlag("--head-lr-mult", "float", 1.0, "a GPT has no classification head"),
    on("--grad-reduce-in-bf16", "gradients are kept and reduced in fp32"),
    on("--fp16-lm-cross-entropy", "the loss is always computed in fp32"),
    OtherFlag("--fp8-recipe", "str", "delayed", _FP8),
    OtherFlag("--fp8-margin", "int", 0, _FP8),
    OtherFlag("--fp8-interval", "int", 1, _FP8),
    OtherFlag("--fp8-amax-history-len", "int", 1, _FP8),
    OtherFlag("--fp8-amax-compute-algo", "str", "most_recent", _FP8),
    on("--fp8-param-gather", _FP8),
    off("--no-fp8-wgrad", _FP8),
    OtherFlag("--cp-comm-type", "strs", ["p2p"], "it is read only with --context-parallel-size"),
    OtherFlag("--ddp-bucket-size", "int", None, _ONE_BUCKET),
    OtherFlag("--ddp-num-buckets", "int", None, _ONE_BUCKET),
    on("--ddp-average-in-collective", "the loss is scaled once, before the backward"),
    off(
        "--disable-gloo-process-groups",
        "CPU groups are made only where they are needed",
        "use_gloo_process_groups",
    ),
    off("--no-align-grad-reduce", _ORDER),
    off("--no-align-param-gather", _ORDER),
    on("--delay-param-gather", _ORDER),
    off("--no-delay-grad-reduce", _ORDER),
    on("--overlap-p2p-communication-warmup-flush", "every transfer overlaps with compute"),
    off("--no-scatter-gather-tensors-in-pipeline", "stages send whole tensors"),
    OtherFlag(
        "--wgrad-deferral-limit", "int", 0, "it is read only with --defer-embedding-wgrad-compute"
    ),
    OtherFlag("--tp-comm-overlap-cfg", "str", None, "it is read only with --tp-comm-overlap"),
    OtherFlag("--lazy-mpu-init", "bool", False, "groups are always made at start"),
    OtherFlag("--local-rank", "int", 0, "torchrun sets LOCAL_RANK in the environment"),
    OtherFlag("--pipeline-model-parallel-split-rank", "int", None, "a GPT has no encoder"),
    on("--cross-entropy-loss-fusion", "there is one implementation of the loss"),
    OtherFlag("--cross-entropy-fusion-impl", "str", "native", "there is one implementation of it"),
    on("--no-persist-layer-norm", "no persistent kernel is used"),
    off("--no-async-tensor-model-parallel-allreduce", "newer Megatron dropped it too"),
    off("--no-clone-scatter-output-in-embedding", "no copy is made that could be saved"),
    on("--te-rng-tracker", "dropout is keyed by its place in the model, not by a tracker"),
    OtherFlag("--mask-prob", "float", 0.15, _BERT),
    OtherFlag("--short-seq-prob", "float", 0.1, _BERT),
    on("--use-gigatoken", "it changes the speed of tokenizing, not its result"),
    on("--use-dist-ckpt", "--ckpt-format torch_dist is the default"),
    OtherFlag("--dist-ckpt-format", "str", None, "--ckpt-format decides"),
    OtherFlag("--ckpt-fully-parallel-save", "yes", True, "every rank writes its own part"),
    off("--no-ckpt-fully-parallel-save", "every rank writes its own part"),
    on("--ckpt-fully-parallel-load", "every rank reads what it holds"),
    OtherFlag(
        "--dist-ckpt-strictness",
        "str",
        "assume_ok_unexpected",
        "a missing or unused weight is always an error",
    ),
    on("--dist-ckpt-optim-fully-reshardable", "optimizer state always loads under any layout"),
    on("--use-persistent-ckpt-worker", "checkpoints are written in the foreground"),
    on("--ckpt-assume-constant-structure", "the save plan is not cached"),
    OtherFlag("--ckpt-convert-save", "str", None, "it is read only with --ckpt-convert-format"),
    OtherFlag(
        "--non-persistent-ckpt-type",
        "str",
        None,
        "it is read only with --non-persistent-save-interval",
    ),
    OtherFlag(
        "--memory-snapshot-path",
        "str",
        "snapshot.pickle",
        "it is read only with --record-memory-history",
    ),
    off("--no-one-logger", _NO_SERVICE, "enable_one_logger"),
    OtherFlag("--one-logger-project", "str", "megatron-lm", _NO_SERVICE),
    OtherFlag("--one-logger-run-name", "str", None, _NO_SERVICE),
    on("--adlr-autoresume", _NO_SERVICE),
    OtherFlag("--adlr-autoresume-interval", "int", 1000, _NO_SERVICE),
    OtherFlag("--moe-router-topk", "int", 2, _MOE),
    OtherFlag("--moe-router-load-balancing-type", "strs", "aux_loss", _MOE),
    OtherFlag("--moe-aux-loss-coeff", "floats", 0.0, _MOE),
    OtherFlag("--moe-z-loss-coeff", "float", None, _MOE),
    on("--moe-grouped-gemm", _MOE),
    OtherFlag("--moe-token-dispatcher-type", "str", "allgather", _MOE),
    OtherFlag("--moe-ffn-hidden-size", "int", None, _MOE),
    OtherFlag("--moe-layer-freq", "int|str", 1, _MOE),
    OtherFlag("--moe-shared-expert-intermediate-size", "int", None, _MOE),
    on("--moe-router-pre-softmax", _MOE),
    OtherFlag("--moe-router-dtype", "str", None, _MOE),
    OtherFlag("--moe-expert-capacity-factor", "float", None, _MOE),
    on("--moe-pad-expert-input-to-capacity", _MOE),
    on("--moe-permute-fusion", _MOE),
    on("--enable-zb-runtime", "one runtime runs every schedule"),
    on("--enable-exactly-numeric-match", "every schedule always gives the same numbers"),
    off(
        "--no-pre-communication-optimization",
        "receives are posted ahead, so no message is sent ahead of another",
    ),
    OtherFlag("--offload-chunk-num", "int", 0, _OFFLOAD),
    OtherFlag("--offload-time", "float", 1.0, _OFFLOAD),
    on("--auto-offload-time", _OFFLOAD),
    off("--no-paired-barrier", _OFFLOAD),
    on("--offload-overlap-sr", _OFFLOAD),
    on("--offload-continuous-buffers", _OFFLOAD),
)

_NO_TE = "it needs Transformer Engine kernels that are not used here; leave it out"
_SCHEDULE = "the split of the backward belongs to the schedule; use --pipeline-schedule"
_NO_FSDP = "parameters are not sharded; use --use-distributed-optimizer"
_NO_DETECTOR = "there is no such detector; leave it out"
_ONE_EVAL = "evaluation uses the training batch size; leave it out"

REFUSED: tuple[OtherFlag, ...] = (
    on("--apply-residual-connection-post-layernorm", "only pre-norm layers exist; leave it out"),
    on("--openai-gelu", "only the exact GELU exists; leave it out"),
    on("--quick-geglu", "it is not implemented; use --swiglu"),
    OtherFlag(
        "--output-logit-dtype", "str", None, "logits have the dtype of the parameters; leave it out"
    ),
    on(
        "--decrease-batch-size-if-needed",
        "the batch is never changed silently; give a --global-batch-size that fits",
    ),
    OtherFlag("--eval-micro-batch-size", "int", None, _ONE_EVAL),
    OtherFlag("--eval-global-batch-size", "int", None, _ONE_EVAL),
    OtherFlag("--exit-signal", "str", "SIGTERM", "only SIGTERM is handled; send that"),
    OtherFlag("--iterations-to-skip", "ints", [], "no iteration is skipped; leave it out"),
    on("--data-parallel-random-init", "data-parallel replicas start equal; leave it out"),
    on("--apply-wd-to-qk-layernorm", "norms have no weight decay; leave it out"),
    on("--use-precision-aware-optimizer", _NO_TE),
    on(
        "--optimizer-cpu-offload",
        "optimizer state stays on the device; use --use-distributed-optimizer to shrink it",
    ),
    OtherFlag("--fp8-format", "str", None, "fp8 is not supported; use --bf16"),
    OtherFlag(
        "--num-distributed-optimizer-instances",
        "int",
        1,
        "optimizer state is sharded over all data-parallel ranks; use 1",
    ),
    on(
        "--overlap-param-gather-with-optimizer-step",
        "it is not supported; use --overlap-param-gather",
    ),
    OtherFlag(
        "--check-weight-hash-across-dp-replicas-interval",
        "int",
        None,
        "replicas are not compared while training; leave it out",
    ),
    on("--use-ring-exchange-p2p", "it needs a modified torch; leave it out"),
    on("--overlap-moe-expert-parallel-comm", "there are no experts; leave it out"),
    on("--overlap-dispatch-backward-with-experts-wgrad", "there are no experts; leave it out"),
    on("--tp-comm-overlap", _NO_TE),
    on("--use-torch-fsdp2", _NO_FSDP),
    on("--use-megatron-fsdp", _NO_FSDP),
    on("--defer-embedding-wgrad-compute", _SCHEDULE),
    on("--delay-wgrad-compute", _SCHEDULE),
    OtherFlag(
        "--cpu-offloading-num-layers",
        "int",
        0,
        "activations stay on the device; use --recompute-granularity to shrink them",
    ),
    on("--recompute-lgd", "it is not supported; use --recompute-granularity"),
    OtherFlag("--s3-cache-path", "str", None, "data is read from files; copy it to a file system"),
    on("--full-validation", "an evaluation has --eval-iters batches; set that"),
    on("--multiple-validation-sets", "there is one validation set; use a blend"),
    on("--dataloader-inter-document-masking", "it is not supported; use --reset-attention-mask"),
    OtherFlag("--sample-rate", "float", 1.0, "all samples are used; build a smaller dataset"),
    OtherFlag("--tokenizer-metadata", "str", None, "use --tokenizer-type and --tokenizer-model"),
    OtherFlag("--start-eval-at-iter", "int", None, "it is not supported; use --eval-interval"),
    OtherFlag(
        "--override-ckpt-iteration",
        "int",
        None,
        "it is not supported; use --finetune to start at iteration 0",
    ),
    on(
        "--use-mp-args-from-checkpoint-args",
        "a checkpoint loads under any layout; give the parallel sizes of this run",
    ),
    OtherFlag("--ckpt-convert-format", "str", None, "use tools/checkpoint/convert.py"),
    OtherFlag(
        "--non-persistent-save-interval",
        "int",
        None,
        "use --save-interval and --save-retain-interval",
    ),
    on("--verify-integrity", "no manifest is written; leave it out"),
    on("--log-straggler", _NO_DETECTOR),
    on("--log-energy", "energy is not measured; leave it out"),
    on("--record-memory-history", "it is not supported; use --log-memory-interval"),
    on("--check-for-spiky-loss", _NO_DETECTOR),
    on("--check-for-large-grads", _NO_DETECTOR),
    OtherFlag("--yaml-cfg", "str", None, "arguments are read from the command line only"),
    on("--measure-activation-memory", "it is not supported; use --log-memory-interval"),
    OtherFlag("--profile-memory-iter", "int", -1, "it is not supported; use --log-memory-interval"),
)


def add_other_flags(parser: argparse.ArgumentParser) -> None:
    """Let the parser know the flags of both tables."""
    for title, table in (("Accepted without effect", IGNORED), ("Refused", REFUSED)):
        group = parser.add_argument_group(title)
        for row in table:
            options = dict(KINDS[row.kind])
            if "type" in options:
                options["metavar"] = "X"
            group.add_argument(
                row.flag,
                dest=row.dest,
                default=row.default,
                help=row.reason.replace("%", "%%"),
                **options,
            )


def set_rows(table: tuple[OtherFlag, ...], values: dict[str, Any]) -> Iterator[OtherFlag]:
    """The rows of a table whose flag is set to something else than its default."""
    return (row for row in table if values.get(row.dest, row.default) != row.default)


def written(flag: str, value: object) -> str:
    """A flag as the user wrote it."""
    return flag if isinstance(value, bool) else f"{flag} {shown(value)}"
