#!/usr/bin/env bash
# Set-up, then rollouts of vLLM under every setting, the trainer's scores with every fault, and the calibration of triage.
# Options go to calibrate.py (--draws, --gap outputs/smollm2_gap ...).
set -euo pipefail
cd "$(dirname "$0")/../.."
bash ci/setup.sh
.venv/bin/python recipes/smollm2_gap/get_model.py .cache/smollm2-135m
.venv/bin/python recipes/triage/make_inputs.py --model .cache/smollm2-135m
.venv/bin/python recipes/triage/calibrate.py "$@"
exec .venv/bin/python recipes/triage/table.py
