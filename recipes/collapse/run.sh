#!/usr/bin/env bash
# Set-up, then a grid (default, fast, full) on all cores, resumable; after the default grid its table and picture. `real`:
# the same task with verl and vLLM in BF16, for an hour.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -n "${PYTHON:-}" ] || bash ci/setup.sh
python=${PYTHON:-.venv/bin/python}
grid=${1:-default}
[ "$grid" != real ] || exec "$python" recipes/collapse/real_engine.py "${@:2}"
"$python" recipes/collapse/grid.py "$grid" "${@:2}"
[ "$grid" != default ] || "$python" recipes/collapse/table.py
