#!/usr/bin/env bash
# Set-up, then the landing scores of SmolLM2-135M with three window lengths, and the page's tables. About a minute
# and a half on one core. Options go to the command, e.g. --text FILE, --tokens 4096.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -n "${PYTHON:-}" ] || bash ci/setup.sh
python=${PYTHON:-.venv/bin/python}
here=recipes/landing
model=${MODEL:-.cache/smollm2-135m}
[ -f "$model/config.json" ] || "$python" recipes/smollm2_gap/get_model.py "$model"
landing() { "$python" -c 'from verl_rounding_align.cli import main; main()' landing --model "$model" "$@"; }
landing --json $here/results/landing.json "$@"
landing --window 64 --json $here/results/window-64.json "$@"
landing --window 2048 --json $here/results/window-2048.json "$@"
"$python" $here/table.py
