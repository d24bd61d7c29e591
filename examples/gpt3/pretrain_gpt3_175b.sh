#!/usr/bin/env bash
# GPT-3 175B (96 layers) on 12 nodes of 8 GPUs: 48 pipeline ranks x 2 replicas.
#
#   DRY_RUN=1 bash examples/gpt3/pretrain_gpt3_175b.sh                # show the command
#   NNODES=12 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=/data/my_text_document \
#       VOCAB_FILE=/data/gpt2-vocab.json MERGE_FILE=/data/gpt2-merges.txt \
#       bash examples/gpt3/pretrain_gpt3_175b.sh                      # on each node
#
# Environment: see examples/launch.sh; RAMPUP_BATCH_SIZE="16 16 5859375" grows the batch at the start.
set -euo pipefail
: "${NNODES:=12}"
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

flags=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --init-method-std 0.006
    --attention-backend auto

    --micro-batch-size "${MICRO_BATCH_SIZE:-1}"
    --global-batch-size "${GLOBAL_BATCH_SIZE:-1536}"
    --train-iters "${TRAIN_ITERS:-500000}"
    --lr 6.0e-5
    --min-lr 6.0e-6
    --lr-decay-style cosine
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --fp16
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1

    --log-interval 100
    --log-throughput
    --eval-interval 1000
    --eval-iters 10
)
if [[ -n ${RAMPUP_BATCH_SIZE:-} ]]; then
    read -ra ramp <<<"$RAMPUP_BATCH_SIZE"
    flags+=(--rampup-batch-size "${ramp[@]}")
fi
parallel_flags 48
data_needs VOCAB_FILE MERGE_FILE
data_flags 50257 --split 949,50,1 --tokenizer-type GPT2BPETokenizer \
    --vocab-file "${VOCAB_FILE:-}" --merge-file "${MERGE_FILE:-}"
output_flags 10000
launch "${flags[@]}" "$@"
