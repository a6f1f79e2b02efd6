#!/usr/bin/env bash
# usage: ARM=none|rope|all bash deepseek_r1_distill_qwen_1_5b.sh [more overrides]; see README.md. Not run on GPUs yet.
exec bash "$(dirname "$0")/run.sh" deepseek_r1_distill_qwen_1_5b "$@"
