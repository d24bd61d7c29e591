#!/usr/bin/env bash
# Llama-2 13B (40 layers, 1.30e10 parameters) on one node of 8 GPUs: 4 pipeline ranks x 2 replicas.
#
#   DRY_RUN=1 bash examples/llama2/pretrain_llama2_13b.sh             # show the command
#   bash examples/llama2/pretrain_llama2_13b.sh --train-iters 20 --lr-warmup-iters 2  # synthetic data
#   DATA_PATH=/data/my_text_document TOKENIZER_MODEL=/data/tokenizer.model \
#       CHECKPOINT_PATH=/data/llama2-13b bash examples/llama2/pretrain_llama2_13b.sh
#
# Environment: see examples/launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

flags+=(
    --num-layers 40
    --hidden-size 5120
    --ffn-hidden-size 13824
    --num-attention-heads 40
    --lr 3e-4
    --min-lr 3e-5
)
launch_llama2 4 "$@"
