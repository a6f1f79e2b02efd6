#!/usr/bin/env bash
# Set-up, then a full report on SmolLM2-135M: the gap between vLLM (compiled, eager) and the trainer (unaligned, aligned,
# every subset of the groups), noise floors, exact KL, attribution, landing score and triage. An interrupted run resumes.
# Options go to `verl-rounding-align gap`, e.g. --tokens 3000 --mode compiled --regions all --full-vocab 0.
set -euo pipefail
cd "$(dirname "$0")/../.."
bash ci/setup.sh
model=.cache/smollm2-135m out=outputs/smollm2_gap
.venv/bin/python recipes/smollm2_gap/get_model.py "$model"
if [ $# -eq 0 ]; then
  set -- --mode both --engine auto --tokens 15000 --full-vocab 512 --regions rope,swiglu,add_rms_norm,carry,paper,all,subsets
fi
.venv/bin/verl-rounding-align gap --model "$model" --out "$out" "$@"
case " $* " in *subsets*) .venv/bin/verl-rounding-align attribute "$out" ;; esac
# the compiled engine against the layout that verl trains with by default (use_remove_padding)
case " $* " in *layout*) packed= ;; *) packed=yes ;; esac
if [ -n "$packed" ] && [ -f "$out/compiled/rollouts.safetensors" ]; then
  mkdir -p "$out-packed/compiled"
  cp "$out"/compiled/{rollouts.*,preset.json} "$out-packed/compiled/"
  [ ! -f "$out/compiled/next_tokens.safetensors" ] || cp "$out/compiled/next_tokens.safetensors" "$out-packed/compiled/"
  .venv/bin/verl-rounding-align gap score "$out-packed" --model "$model" --layout packed --regions paper,all --no-noise
fi
.venv/bin/verl-rounding-align landing --model "$model" --json "$out/landing.json"
.venv/bin/verl-rounding-align gap report "$out"
