#!/usr/bin/env bash
# What must hold: installs the test extra into .venv, then lint, types and tests.
# Without arguments two processes share the tests. Arguments go to pytest instead, which is then one process:
# bash tests/run.sh tests/losses; bash tests/run.sh -m '' runs the long ones too; -n 2 shares as without arguments.
set -euo pipefail
cd "$(dirname "$0")/.."

source jobs/environment.sh "[test]"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
if (($# == 0)); then
    set -- --numprocesses=2
fi
.venv/bin/python -m pytest "$@"
