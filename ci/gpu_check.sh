#!/usr/bin/env bash
# On one NVIDIA GPU, in under 8 minutes: region equality on Triton, overhead and memory of Qwen3 layer shapes, and whether
# `carry` is rounded at either residual add of a vLLM-shaped piece. Needs torch, triton and transformers; not vLLM, not an
# installed copy of this package. Options go to recipes/overhead/gpu_check.py; `--device cpu --small` checks the logic.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
exec timeout --signal=INT 470 "$python" recipes/overhead/gpu_check.py "$@"
