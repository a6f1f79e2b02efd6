#!/usr/bin/env bash
# Makes .venv in the repository root with everything that runs here on a CPU. Needs Python 3.10-3.12 with pip and venv.
# Does nothing when neither pyproject.toml nor the scripts have changed since the last run.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
stamp=.venv/setup-stamp
want=$(cat pyproject.toml ci/setup.sh ci/fit_venv.py verl_rounding_align/integrations/hydra_plugins/*.py | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  echo "setup: .venv is up to date"
  exit 0
fi
rm -f "$stamp"

if [ ! -x .venv/bin/python ]; then
  "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' || {
    echo "setup: $("$python" -V) is not supported; set PYTHON to a Python 3.10, 3.11 or 3.12" >&2
    exit 1
  }
  "$python" -m venv .venv
fi
# pip 23.2 was still backtracking over verl's and vLLM's requirements after ten minutes; pip 26.3 needs seconds.
.venv/bin/python -m pip install --quiet --upgrade pip
.venv/bin/python -m pip install --editable '.[cpu,test,docs]'
.venv/bin/python ci/fit_venv.py
echo "$want" > "$stamp"
echo "setup: .venv is ready"
