#!/usr/bin/env bash
# Set-up, then the gap of SmolLM2-135M between compiled vLLM and the trainer, unaligned and aligned. Options go to
# `verl-rounding-align gap` (--tokens, --mode, --regions ...).
set -euo pipefail
cd "$(dirname "$0")/../.."
bash ci/setup.sh
.venv/bin/python recipes/smollm2_gap/get_model.py .cache/smollm2-135m
exec .venv/bin/verl-rounding-align gap --model .cache/smollm2-135m --out outputs/smollm2_gap "$@"
