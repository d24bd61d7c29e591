#!/usr/bin/env bash
# Llama-2 70B (80 layers, 6.90e10 parameters): 16 pipeline ranks, so nodes in pairs; 16 nodes of 8
# GPUs make 8 replicas. Every layer is recomputed, which 16 micro-batches in flight make necessary.
#
#   NNODES=16 DRY_RUN=1 bash examples/llama2/pretrain_llama2_70b.sh   # show the command
#   NNODES=16 NODE_RANK=0 MASTER_ADDR=node0 bash examples/llama2/pretrain_llama2_70b.sh   # each node
#   sbatch --nodes=16 examples/slurm/pretrain.sbatch examples/llama2/pretrain_llama2_70b.sh
#
# Environment: see examples/launch.sh; DATA_PATH goes with TOKENIZER_MODEL.
set -euo pipefail
: "${NNODES:=16}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

flags+=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --lr 1.5e-4
    --min-lr 1.5e-5
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
launch_llama2 16 "$@"
