#!/usr/bin/env bash
# From a fresh clone to a trained model: real text, two pipeline ranks on the CPU, no download of
# data. Everything it makes is in quickstart_out/; what is there already is used again.
#
#   bash examples/quickstart.sh
#   SCHEDULES="1f1b" ITERATIONS=60 OUT=/tmp/try bash examples/quickstart.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SCHEDULES=${SCHEDULES:-1f1b zb-v}   # each is trained in turn on the same data
ITERATIONS=${ITERATIONS:-100}   # of which the last tenth is trained after a resume
OUT=${OUT:-quickstart_out}
VOCABULARY=4096

EXTRAS=plot; source examples/make_environment.sh
export OMP_NUM_THREADS=1
mkdir -p "$OUT"

step() { printf '\n== %s\n' "$*"; }

step "1. Corpus: the source files of Python's standard library, as JSON lines"
[ -e "$OUT/corpus.jsonl" ] || python examples/quickstart_data.py corpus "$OUT/corpus.jsonl"
ls -lh "$OUT/corpus.jsonl"

step "2. Tokenizer: SentencePiece, $VOCABULARY pieces, trained on the corpus"
[ -e "$OUT/tokenizer.model" ] ||
    python examples/quickstart_data.py tokenizer "$OUT/corpus.jsonl" "$OUT/tokenizer" $VOCABULARY
ls -lh "$OUT/tokenizer.model"

step "3. Preprocessing to .bin and .idx"
[ -e "$OUT/corpus_text_document.idx" ] || python tools/preprocess_data.py \
    --input "$OUT/corpus.jsonl" --output-prefix "$OUT/corpus" --append-eod --workers 2 \
    --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model"
ls -lh "$OUT"/corpus_text_document.*

# A Llama in miniature: RMSNorm, SwiGLU, rotary positions, grouped queries, untied head.
MODEL=(
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length 128 --max-position-embeddings 128
    --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model"
)
DATA=(--data-path "$OUT/corpus_text_document" --split 95,4,1 --num-workers 0)
OPTIMIZER=(
    --micro-batch-size 4 --global-batch-size 16 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    --lr-decay-iters "$ITERATIONS" --lr-warmup-iters 10 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta2 0.95 --seed 1234
)

# Of a run's output, what is shown here; the log has all of it.
SHOWN='^ \[.*0/ |validation loss at|(saving|saved|loading|loaded) checkpoint|Error|^\[rank'

# train SCHEDULE ITERATIONS: trains up to that iteration, from the checkpoint if there is one.
train() {
    local out="$OUT/$1"
    torchrun --standalone --nproc-per-node 2 pretrain_gpt.py \
        --pipeline-model-parallel-size 2 --pipeline-schedule "$1" \
        "${MODEL[@]}" "${DATA[@]}" "${OPTIMIZER[@]}" --train-iters "$2" \
        --log-interval 1 --eval-interval 50 --eval-iters 4 \
        --save "$out/checkpoints" --load "$out/checkpoints" --save-interval 50 \
        --metrics-file "$out/metrics.jsonl" 2>&1 | tee -a "$out/train.log" |
        { grep --line-buffered -E "$SHOWN" || true; }
}

LOGS=()
for schedule in $SCHEDULES; do
    mkdir -p "$OUT/$schedule"
    LOGS+=("$OUT/$schedule/train.log")
    if [ -e "$OUT/$schedule/finished" ]; then
        step "4. $schedule is trained already (remove $OUT/$schedule to train it again)"
        continue
    fi
    rm -rf "$OUT/$schedule"; mkdir -p "$OUT/$schedule"
    step "4. Training with the schedule $schedule on 2 processes, $ITERATIONS iterations"
    train "$schedule" $((ITERATIONS * 9 / 10))
    step "   Resuming $schedule from its checkpoint"
    train "$schedule" "$ITERATIONS"
    touch "$OUT/$schedule/finished"
done

step "5. The logs"
python tools/compare_logs.py "${LOGS[@]}" --names $SCHEDULES --plot "$OUT/losses.png" --require-equal-loss

step "Done"
for schedule in $SCHEDULES; do
    echo "$schedule: log $OUT/$schedule/train.log"
    echo "$schedule: checkpoint $OUT/$schedule/checkpoints (iteration $(cat "$OUT/$schedule/checkpoints/latest_checkpointed_iteration.txt"))"
done
echo "picture of the losses: $OUT/losses.png"
