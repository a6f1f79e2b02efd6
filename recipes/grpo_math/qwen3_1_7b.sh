#!/usr/bin/env bash
# usage: ARM=none|rope|all bash qwen3_1_7b.sh [more overrides]; see README.md. Not run on GPUs yet.
exec bash "$(dirname "$0")/run.sh" qwen3_1_7b "$@"
