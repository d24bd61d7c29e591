# Sourced by pretrain_llama2_*.sh: what the three sizes share (Llama-2 paper, arXiv:2307.09288).

source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

flags=(
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --disable-bias-linear
    --position-embedding-type rope
    --rotary-base 10000
    --rotary-percent 1.0
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --attention-softmax-in-fp32
    --no-masked-softmax-fusion
    --make-vocab-size-divisible-by 128
    --seq-length 4096
    --max-position-embeddings 4096
    --init-method-std 0.02

    --micro-batch-size "${MICRO_BATCH_SIZE:-1}"
    --global-batch-size "${GLOBAL_BATCH_SIZE:-1024}" # 4M tokens
    --train-iters "${TRAIN_ITERS:-500000}"           # 2T tokens
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --adam-eps 1e-5
    --bf16
    --attention-backend flash

    --log-interval 10
    --log-throughput
    --eval-interval 1000
    --eval-iters 10
)

# Needs: DATA_PATH with TOKENIZER_MODEL (a sentencepiece model), or neither.
launch_llama2() { # DEFAULT_PIPELINE_SIZE FLAG...
    parallel_flags "$1"
    data_needs TOKENIZER_MODEL
    data_flags 32000 --split 949,50,1 --tokenizer-type Llama2Tokenizer \
        --tokenizer-model "${TOKENIZER_MODEL:-}"
    output_flags 1000
    launch "${flags[@]}" "${@:2}"
}
