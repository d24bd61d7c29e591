# Sourced by the launch scripts. Defines `launch FLAG...`, which runs pretrain_gpt.py with these flags
# on every GPU of every node, or with DRY_RUN=1 prints the command (quoted for a shell) instead.
#
# From the environment, with defaults for one machine:
#   NNODES NODE_RANK GPUS_PER_NODE MASTER_ADDR MASTER_PORT   who takes part, and where they meet
#   TP_SIZE PIPELINE_SIZE SCHEDULE                           how the model is spread
#   MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE                       sequences
#   DATA_PATH                                                dataset prefix; none: synthetic data
#   CHECKPOINT_PATH TENSORBOARD_LOGS_PATH                    where to write; none: nothing is written
# Further flags of pretrain_gpt.py go on the script's own command line; they win over the script's.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

launch() {
    local command=(
        torchrun
        --nproc_per_node "${GPUS_PER_NODE:-8}"
        --nnodes "${NNODES:-1}"
        --node_rank "${NODE_RANK:-0}"
        --master_addr "${MASTER_ADDR:-localhost}"
        --master_port "${MASTER_PORT:-6000}"
        "$repository/pretrain_gpt.py"
        "$@"
    )
    if [[ ${DRY_RUN:-0} == 1 ]]; then
        printf '%q ' "${command[@]}"
        echo
    else
        exec "${command[@]}"
    fi
}

# Flags that follow from the environment alone.
parallel_flags() { # DEFAULT_PIPELINE_SIZE
    local tp=${TP_SIZE:-1}
    flags+=(
        --tensor-model-parallel-size "$tp"
        --pipeline-model-parallel-size "${PIPELINE_SIZE:-$1}"
        --pipeline-schedule "${SCHEDULE:-1f1b}"
        --use-distributed-optimizer
    )
    if ((tp > 1)); then
        flags+=(--sequence-parallel)
    fi
}

# With real data, these variables must be set too.
data_needs() { # VARIABLE...
    local name
    for name in "$@"; do
        if [[ -n ${DATA_PATH:-} && -z ${!name:-} ]]; then
            echo "DATA_PATH is set, so $name is needed as well" >&2
            exit 2
        fi
    done
}

data_flags() { # VOCABULARY_SIZE TOKENIZER_FLAG...
    local vocabulary=$1
    shift
    if [[ -n ${DATA_PATH:-} ]]; then
        local prefixes
        read -ra prefixes <<<"$DATA_PATH" # one prefix, or: weight prefix weight prefix ...
        flags+=(--data-path "${prefixes[@]}" "$@")
    else
        flags+=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$vocabulary")
    fi
}

output_flags() { # SAVE_INTERVAL
    if [[ -n ${CHECKPOINT_PATH:-} ]]; then
        flags+=(--save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval "$1")
    fi
    if [[ -n ${TENSORBOARD_LOGS_PATH:-} ]]; then
        flags+=(--tensorboard-dir "$TENSORBOARD_LOGS_PATH")
    fi
}
