#!/usr/bin/env bash
# Set-up, then real GRPO three times on this machine's CPU. Options go to quickstart.py: --arms, --steps, --out.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bash "$here/../../ci/setup.sh"
exec "$here/../../.venv/bin/python" "$here/quickstart.py" "$@"
