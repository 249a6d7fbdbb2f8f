#!/usr/bin/env bash
# What must hold: installs the test extra into .venv, then lint, types and tests.
# Arguments go to pytest: bash tests/run.sh tests/losses; bash tests/run.sh -m '' runs the long ones too.
set -euo pipefail
cd "$(dirname "$0")/.."

source jobs/environment.sh "[test]"
bash tests/lint.sh
.venv/bin/python -m pytest "$@"
