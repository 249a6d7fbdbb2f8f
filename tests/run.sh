#!/usr/bin/env bash
# Everything that must hold: installs the test extra into .venv, then lint, types and all tests.
# Arguments go to pytest: bash tests/run.sh tests/losses
set -euo pipefail
cd "$(dirname "$0")/.."

source jobs/environment.sh "[test]"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python -m pytest "$@"
