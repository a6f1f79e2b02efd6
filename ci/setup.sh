#!/usr/bin/env bash
# Makes .venv in the repository root with everything that runs here on a CPU. Needs Python 3.10-3.12 with pip and venv:
# the one that PYTHON names, else the first that fits of python3, python3.12, python3.11 and python3.10.
# Does nothing when nothing that decides what is installed has changed since the last run. vLLM's CPU wheel wants PyTorch's
# CPU build (its version ends in +cpu): where pip does not find it, name PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/setup-stamp
# Requirements and entry points, this set-up, Hydra's plugin (the installation holds a copy), the folder it points to.
want=$({ cat pyproject.toml ci/setup.sh ci/fit_venv.py verl_rounding_align/integrations/hydra_plugins/*.py; pwd -P; } | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  echo "setup: .venv is up to date"
  exit 0
fi
rm -f "$stamp"

fits() {
  "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' 2>/dev/null
}

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then # none yet, or one whose making was interrupted
  candidates=(python3 python3.12 python3.11 python3.10)
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for python in "${candidates[@]}" ""; do
    if [ -n "$python" ] && fits "$python"; then break; fi
  done
  if [ -z "$python" ]; then
    echo "setup: no Python 3.10, 3.11 or 3.12 among: ${candidates[*]}; set PYTHON to one" >&2
    exit 1
  fi
  echo "setup: making .venv with $("$python" -V), $python"
  "$python" -m venv --clear .venv
fi

log=.venv/setup.log
pip_install() {
  .venv/bin/python -m pip install "$@" >> "$log" 2>&1 || {
    tail -n 30 "$log" >&2
    echo "setup: pip failed, see above; all that it said is in $log" >&2
    exit 1
  }
}
: > "$log"
echo "setup: installing this package with its extras cpu, test and docs (the first time several minutes and 2 GB)"
# pip 23.2 was still backtracking over verl's and vLLM's requirements after ten minutes; pip 26.3 needs seconds.
pip_install --upgrade pip
pip_install --editable '.[cpu,test,docs]'
.venv/bin/python ci/fit_venv.py
echo "$want" > "$stamp"
echo "setup: .venv is ready"
