#!/usr/bin/env bash
# Sets up what the checks need, then runs all of them: format, lint, types, shell scripts, tests.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: scripts/test.sh [PYTEST ARGUMENTS]

Without arguments, runs every check: ruff, mypy, shellcheck and the whole test suite.
With arguments, only pytest with these arguments, for example
  scripts/test.sh tests/unit
  scripts/test.sh tests/distributed/test_exactness.py -k muon

The environment is that of scripts/setup_venv.sh (see its --help).
USAGE
}

case ${1:-} in
    -h | --help)
        usage
        exit
        ;;
esac

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
export MEGATRON_ASYNC_EXTRAS=dev
PYTHON=$("$ROOT/scripts/setup_venv.sh")
BIN=$(dirname "$PYTHON")
# No GPU: the suite tests the same thing everywhere. One thread a rank: the ranks share the cores.
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 WANDB_MODE=offline

if [[ $# -gt 0 ]]; then
    exec "$PYTHON" -m pytest "$@"
fi

check() {
    printf '> %s\n' "$*"
    "$@"
}

check "$BIN/ruff" format --check .
check "$BIN/ruff" check .
check "$BIN/mypy"
mapfile -t shell_scripts < <(find scripts recipes .ci -type f \( -name '*.sh' -o -path '.ci/run' \) | sort)
check "$BIN/shellcheck" "${shell_scripts[@]}"
check "$PYTHON" -m pytest --durations=10
