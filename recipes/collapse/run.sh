#!/usr/bin/env bash
# Set-up, then a grid (default, fast, full) on all cores, resumable; after the default grid its table and picture.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -n "${PYTHON:-}" ] || bash ci/setup.sh
python=${PYTHON:-.venv/bin/python}
grid=${1:-default}
"$python" recipes/collapse/grid.py "$grid" "${@:2}"
[ "$grid" != default ] || "$python" recipes/collapse/table.py
