#!/usr/bin/env bash
# usage: ARM=none|rope|all bash run.sh OVERLAY [more overrides]; OVERLAY is a file of conf/grpo_math without its .yaml.
# DATA_DIR: where prepare_data.py wrote; MODEL_PATH: instead of the overlay's model. See README.md. Not run on GPUs yet.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
case "${ARM:-}" in
  none | rope | all) ;;
  *)
    echo "ARM='${ARM:-}': choose from none, rope, all" >&2
    exit 2
    ;;
esac
export DATA_DIR=${DATA_DIR:-$PWD/data/grpo_math}
overlay=$1
shift
exec python -m verl.trainer.main_ppo --config-dir "$here/conf" "+grpo_math=$overlay" "+rounding_align=$ARM" \
  "trainer.experiment_name=$overlay-$ARM" "$@"
