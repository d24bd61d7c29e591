#!/usr/bin/env bash
# The models on which zero-bubble schedules were measured (arXiv:2401.10241, table 3): sequences of
# 1024, and a layer less on the first and the last stage, which hold the embedding and the head.
#
#   DRY_RUN=1 bash examples/gpt3/pretrain_gpt3_zero_bubble_paper.sh   # show the command
#   bash examples/gpt3/pretrain_gpt3_zero_bubble_paper.sh             # 1.5B on 8 GPUs, synthetic data
#   MODEL_SIZE=6.2b NUM_MICROBATCHES=64 bash examples/gpt3/pretrain_gpt3_zero_bubble_paper.sh
#
# Environment: MODEL_SIZE (1.5b, 6.2b, 14.6b, 28.3b), NUM_MICROBATCHES per iteration, EXIT_INTERVAL,
# and see examples/launch.sh; DATA_PATH goes with TOKENIZER_MODEL.
set -euo pipefail

case ${MODEL_SIZE:-1.5b} in
    #      layers heads hidden pipeline micro-batch micro-batches
    1.5b)  row=(22 24 2304 8 6 24) ;;
    6.2b)  row=(30 32 4096 8 3 24) ;;
    14.6b) row=(46 40 5120 16 1 48) ;;
    28.3b) row=(62 48 6144 32 1 96) ;;
    *)
        echo "MODEL_SIZE is ${MODEL_SIZE}; choose 1.5b, 6.2b, 14.6b or 28.3b" >&2
        exit 2
        ;;
esac
read -r layers heads hidden pipeline micro_batch micro_batches <<<"${row[*]}"
: "${NNODES:=$((pipeline / 8))}"
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

# Data-parallel replicas, to keep the number of micro-batches whatever the number of nodes.
replicas=$((NNODES * ${GPUS_PER_NODE:-8} / (${PIPELINE_SIZE:-$pipeline} * ${TP_SIZE:-1})))
micro_batch=${MICRO_BATCH_SIZE:-$micro_batch}
global_batch=$((micro_batch * ${NUM_MICROBATCHES:-$micro_batches} * replicas))

flags=(
    --num-layers "$layers"
    --allow-padding-num-layers
    --hidden-size "$hidden"
    --num-attention-heads "$heads"
    --seq-length 1024
    --max-position-embeddings 1024
    --init-method-std 0.006
    --untie-embeddings-and-output-weights
    --use-flash-attn

    --micro-batch-size "$micro_batch"
    --global-batch-size "${GLOBAL_BATCH_SIZE:-$global_batch}"
    --train-samples 146484375
    --lr-decay-samples 126953125
    --lr-warmup-samples 183105
    --lr 6.0e-5
    --min-lr 6.0e-6
    --lr-decay-style cosine
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 8.0
    --fp16

    --log-interval 10
    --log-throughput
    --eval-interval 10000
    --eval-iters 40
    --exit-interval "${EXIT_INTERVAL:-1000}"
    --no-create-attention-mask-in-dataloader
    --no-barrier-with-level-1-timing
)
parallel_flags "$pipeline"
data_needs TOKENIZER_MODEL
data_flags 50257 --split 98,2,0 --tokenizer-type GPTSentencePieceTokenizer \
    --tokenizer-model "${TOKENIZER_MODEL:-}"
output_flags 1000
launch "${flags[@]}" "$@"
