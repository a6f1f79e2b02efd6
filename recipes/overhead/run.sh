#!/usr/bin/env bash
# Set-up, then what alignment costs on this machine: two models, against eager Hugging Face, and against what a user would
# pick instead. Options go to run.py. One CPU thread; results/*.json are what this wrote, README tables come from them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bash "$here/../../ci/setup.sh"
export KINETO_LOG_LEVEL=99 OMP_NUM_THREADS=1
exec "$here/../../.venv/bin/python" "$here/run.py" "$@"
