#!/usr/bin/env bash
# A small GPT on two CPU processes, three times: synchronous pipeline, asynchronous, asynchronous with error feedback.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: recipes/quickstart.sh [--fast] [TRAINING FLAGS]

Trains a byte-level GPT on the source files of Python's standard library, on a pipeline of two stages (two processes
of one thread each, no GPU needed), with Muon, the same seed and the same data:
  sync       Megatron's own 1F1B schedule
  async      --pipeline-schedule 2bw-async
  async-ef   --pipeline-schedule 2bw-async --async-error-feedback
and prints losses, gaps and throughput side by side. Makes the environment and the data first, if they are not there.

  --fast           a quarter of the updates
  TRAINING FLAGS   passed on to every run, after the recipe's own: any flag of Megatron, e.g. --lr 4e-3

  QUICKSTART_DIR    results (default: runs/quickstart)
  QUICKSTART_DATA   data set (default: data/quickstart), built once
  MASTER_PORT       port of torchrun (default: a free one)
  WANDB_PROJECT     wandb project; runs stay offline (default: megatron-async-quickstart)
and those of scripts/setup_venv.sh.
USAGE
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
RESULTS=${QUICKSTART_DIR:-$ROOT/runs/quickstart}
DATA=${QUICKSTART_DATA:-$ROOT/data/quickstart}
TRAIN_ITERS=450
while [[ $# -gt 0 ]]; do
    case $1 in
        -h | --help)
            usage
            exit
            ;;
        --fast) TRAIN_ITERS=120 ;;
        *) break ;;
    esac
    shift
done

PYTHON=$("$ROOT/scripts/setup_venv.sh")
mkdir -p "$RESULTS" "$DATA"
# Two stages, one thread each: this recipe shows the method, so it runs the same way everywhere.
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 WANDB_MODE=offline WANDB_SILENT=true

if [[ ! -f $DATA/stdlib.idx ]]; then
    STDLIB=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    "$PYTHON" "$ROOT/scripts/prepare_data.py" --output-prefix "$DATA/stdlib" --tokenizer byte --append-eod \
        --input "$STDLIB" --glob '**/*.py' --errors skip \
        --exclude 'site-packages/*' 'dist-packages/*' 'test/*' '*/test/*' '*/tests/*'
fi

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
    --max-position-embeddings 128
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --transformer-impl local
    --attention-backend unfused
    --no-masked-softmax-fusion
    --no-rope-fusion
    --no-bias-swiglu-fusion
    --no-persist-layer-norm
    --no-gradient-accumulation-fusion
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 16
    --train-iters "$TRAIN_ITERS"
    --seed 1234
    --optimizer muon
    --muon-momentum 0.95
    --muon-nesterov
    --muon-scale-mode spectral
    --muon-extra-scale-factor 0.2
    --muon-num-ns-steps 5
    --muon-tp-mode duplicated
    --muon-scalar-optimizer adam
    --adam-beta1 0.9
    --adam-beta2 0.95
    --lr 8e-3
    --min-lr 8e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --clip-grad 1.0
)
MODEL_PARALLEL_ARGS=(
    --pipeline-model-parallel-size 2
    --tensor-model-parallel-size 1
    --distributed-backend gloo
)
DATA_ARGS=(
    --data-path "$DATA/stdlib"
    --data-cache-path "$DATA/cache"
    --split '95,5,0'
    --tokenizer-type NullTokenizer
    --vocab-size 257
    --num-workers 0
)

# Trains one run: train NAME [FLAGS OF THIS RUN].
train() {
    local name=$1 directory=$RESULTS/$1
    shift
    mkdir -p "$directory"
    rm -rf "$directory/tensorboard" "$directory/wandb" "$directory/log.txt"
    local eval_and_logging_args=("${EVAL_AND_LOGGING_ARGS[@]}" --tensorboard-dir "$directory/tensorboard")
    eval_and_logging_args+=(--wandb-exp-name "$name" --wandb-save-dir "$directory")
    local rendezvous=(--standalone)
    [[ -z ${MASTER_PORT:-} ]] || rendezvous=(--master-port "$MASTER_PORT")
    local command=(
        "$PYTHON" -m torch.distributed.run --nproc-per-node 2 "${rendezvous[@]}"
        "$ROOT/scripts/pretrain_gpt.py" "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}"
        "${DATA_ARGS[@]}" "${eval_and_logging_args[@]}" "$@"
    )
    printf '\n== %s (all output: %s)\n' "$name" "$directory/log.txt"
    printf '%q ' "${command[@]}"
    printf '\n'
    if ! "${command[@]}" 2>&1 | tee "$directory/log.txt" | sed -unE "$PROGRESS"; then
        # Without torchrun's own report, which only repeats that a rank failed.
        sed '/ failed (exitcode/,$d' "$directory/log.txt" | tail -n 30 >&2
        printf 'quickstart.sh: error: the run %s failed; its last output is above\n' "$name" >&2
        exit 1
    fi
}

EVAL_AND_LOGGING_ARGS=(
    --eval-interval 50
    --eval-iters 8
    --log-interval 10
    --tensorboard-log-interval 1
    --log-timers-to-tensorboard
    --log-throughput
    --wandb-project "${WANDB_PROJECT:-megatron-async-quickstart}"
)
# What a terminal shows of Megatron's log.
PROGRESS='s/.* iteration +([0-9]+)\/ +([0-9]+) .*iteration \(ms\): ([0-9]+).* lm loss: ([0-9.E+-]+).*/'
PROGRESS+='   iteration \1 of \2   loss \4   \3 ms an iteration/;s/E\+00//;/^   iteration/p
s/.*(validation loss at iteration [0-9]+).* value: ([0-9.E+-]+) .*/   \1: \2/;s/E\+00//;/^   validation/p'

train sync --pipeline-schedule 1f1b "$@"
train async --pipeline-schedule 2bw-async "$@"
train async-ef --pipeline-schedule 2bw-async --async-error-feedback "$@"

printf '\n== Comparison\n'
"$PYTHON" "$ROOT/scripts/compare_runs.py" "$RESULTS"/{sync,async,async-ef} --recovery async-ef:async \
    --json "$RESULTS/comparison.json" --png "$RESULTS/losses.png" --require-complete \
    --title "Byte-level GPT on Python's standard library, Muon, two pipeline stages" | tee "$RESULTS/comparison.md"
printf '\nLoss curves: %s\nThe wandb runs are offline; to upload them: wandb sync %s\n' \
    "$RESULTS/losses.png" "$RESULTS/*/wandb/offline-run-*"
