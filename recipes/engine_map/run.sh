#!/usr/bin/env bash
# The releases' venvs and probes, then the table in README.md. Options go to engine_map.py (--versions, --again).
# About 3.5 GB of disk and 8 minutes per release on two CPU cores; .cache/engine_map holds the venvs and may be deleted.
set -euo pipefail
cd "$(dirname "$0")/../.."
bash ci/setup.sh
.venv/bin/python recipes/engine_map/engine_map.py "$@"
exec .venv/bin/python recipes/engine_map/table.py
