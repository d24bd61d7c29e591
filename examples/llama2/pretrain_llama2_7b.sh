#!/usr/bin/env bash
# Llama-2 7B (32 layers, 6.74e9 parameters) on one node of 8 GPUs: 4 pipeline ranks x 2 replicas.
#
#   DRY_RUN=1 bash examples/llama2/pretrain_llama2_7b.sh              # show the command
#   bash examples/llama2/pretrain_llama2_7b.sh --train-iters 20 --lr-warmup-iters 2   # synthetic data
#   DATA_PATH=/data/my_text_document TOKENIZER_MODEL=/data/tokenizer.model \
#       CHECKPOINT_PATH=/data/llama2-7b bash examples/llama2/pretrain_llama2_7b.sh
#
# Environment: see examples/launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

flags+=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --lr 3e-4
    --min-lr 3e-5
)
launch_llama2 4 "$@"
