#!/usr/bin/env bash
# Set-up, lint, tests. Arguments go to pytest: `bash ci/test.sh -m "not slow"`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh
bash ci/lint.sh
.venv/bin/python -m pytest "$@"
