#!/usr/bin/env bash
# Set-up, then read from vLLM's graph where SmolLM2 stores values, draw the picture, write the page's table. About two minutes.
# Options go to the site map, e.g. --layers 2.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -n "${PYTHON:-}" ] || bash ci/setup.sh
python=${PYTHON:-.venv/bin/python}
here=recipes/where_it_rounds
model=${MODEL:-.cache/smollm2-135m}
[ -f "$model/config.json" ] || "$python" recipes/smollm2_gap/get_model.py "$model"
sites() { "$python" -c 'from verl_rounding_align.cli import main; main()' sites --model "$model" "$@"; }
sites --mode both --json $here/results/sites-smollm2.json "$@"
sites --split --json $here/results/sites-smollm2-split.json "$@"
"$python" $here/picture.py
