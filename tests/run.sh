#!/usr/bin/env bash
# The whole check, from a fresh clone: environment, format, lint, types, tests. Extra arguments go
# to pytest:  bash tests/run.sh -k plans
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

EXTRAS=dev; source examples/make_environment.sh
export OMP_NUM_THREADS=1

ruff format --check --quiet . || { echo "format: run 'ruff format .'" >&2; exit 1; }
ruff check --quiet .
mypy
python -m pytest "$@"
