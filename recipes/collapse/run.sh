#!/usr/bin/env bash
# Set-up, then a grid of grid.py (default, fast, arms, seeds, widths, rates, coarse_gradients, full) on all cores, resumable, with its
# table and picture under outputs/collapse/. `real`: the same task with verl and vLLM in BF16, for an hour.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -n "${PYTHON:-}" ] || bash ci/setup.sh
python=${PYTHON:-.venv/bin/python}
grid=${1:-default}
[ "$grid" != real ] || exec "$python" recipes/collapse/real_engine.py "${@:2}"
exec "$python" recipes/collapse/grid.py "$grid" "${@:2}"
