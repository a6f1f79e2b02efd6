#!/usr/bin/env bash
# The checks of .pre-commit-config.yaml over the whole repository.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/ruff check .
.venv/bin/ruff format --check .
