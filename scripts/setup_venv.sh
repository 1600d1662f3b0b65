#!/usr/bin/env bash
# Makes or reuses a virtual environment with megatron-async and all it needs, and prints the path of its Python.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: PYTHON=$(scripts/setup_venv.sh)

Prints the path of a Python that has megatron-async from this checkout, with everything that recipes and tests need.
Progress goes to standard error. A second call only checks, in about a second.

The environment is, in this order,
  $MEGATRON_ASYNC_VENV   made or completed there,
  the active one         ($VIRTUAL_ENV or $CONDA_PREFIX) if it already has everything; it is never changed,
  .venv                  in this checkout, made or completed.

  MEGATRON_ASYNC_BASE_PYTHON   Python (3.12 or newer) to make a new environment with (default: the first one found)
  MEGATRON_ASYNC_EXTRAS        extras of the package to install (default: test)
USAGE
}

say() { printf '> %s\n' "$*" >&2; }
die() {
    printf 'setup_venv.sh: error: %s\n' "$*" >&2
    exit 1
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
EXTRAS=${MEGATRON_ASYNC_EXTRAS:-test}

# Prints what is missing in the environment of Python $1; nothing if it is complete.
missing() {
    "$1" -I - "$ROOT" "$EXTRAS" <<'PYTHON'
import json, sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement

root, extras = Path(sys.argv[1]), set(sys.argv[2].split(","))


def check(name, extras, seen):
    for text in distribution(name).requires or []:
        need = Requirement(text)
        if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            continue
        try:
            version = distribution(need.name).version
        except PackageNotFoundError:
            return f"{need} is not installed"
        if not need.specifier.contains(version, prereleases=True):
            return f"{need.name} {version} is installed, {need.specifier} is needed"
        if need.extras and need.name not in seen:
            problem = check(need.name, need.extras, seen | {need.name})
            if problem:
                return problem
    return ""


if sys.version_info < (3, 12):
    sys.exit(print(f"Python {sys.version.split()[0]} is older than 3.12"))
try:
    own = distribution("megatron-async")
except PackageNotFoundError:
    sys.exit(print("megatron-async is not installed"))
origin = json.loads(own.read_text("direct_url.json") or "{}").get("url")
metadata = next(file.locate() for file in own.files if file.name == "METADATA")
if origin != root.as_uri():
    sys.exit(print(f"megatron-async comes from {origin}, not from this checkout"))
if metadata.stat().st_mtime < (root / "setup.py").stat().st_mtime:
    sys.exit(print("setup.py is newer than the installation"))
print(check("megatron-async", extras, set()), end="")
PYTHON
}

# Prints the first Python that is new enough.
base_python() {
    local candidate
    for candidate in ${MEGATRON_ASYNC_BASE_PYTHON:-python3.12 python3.13 python3.14 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    die "no Python 3.12 or newer found; install one, or name it in MEGATRON_ASYNC_BASE_PYTHON"
}

main() {
    case ${1:-} in
        -h | --help)
            usage
            return
            ;;
        ?*) die "unknown argument $1; see --help" ;;
    esac
    local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} venv=${MEGATRON_ASYNC_VENV:-} problem base
    cd "$ROOT" # for .python-version
    if [[ -z $venv && -n $active && -x $active/bin/python ]]; then
        problem=$(missing "$active/bin/python")
        if [[ -z $problem ]]; then
            printf '%s\n' "$active/bin/python"
            return
        fi
        [[ $active -ef $ROOT/.venv ]] || say "the active environment $active is left alone: $problem"
    fi
    venv=${venv:-$ROOT/.venv}
    if [[ ! -x $venv/bin/python ]]; then
        base=$(base_python)
        say "making the environment $venv with $("$base" --version)"
        "$base" -m venv "$venv" >&2 || die "$base can't make an environment (on Debian: apt install python3-venv)"
    fi
    problem=$(missing "$venv/bin/python")
    if [[ -n $problem ]]; then
        say "installing into $venv ($problem); the first time downloads PyTorch, which takes minutes"
        "$venv/bin/python" -m pip install --disable-pip-version-check --editable "${ROOT}[${EXTRAS}]" >&2 ||
            die "pip could not install megatron-async[$EXTRAS] into $venv; its messages are above"
        problem=$(missing "$venv/bin/python")
        [[ -z $problem ]] || die "$venv is still incomplete: $problem; remove it and run this again"
    fi
    printf '%s\n' "$(cd "$venv" && pwd)/bin/python"
}

main "$@"
