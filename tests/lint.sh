#!/usr/bin/env bash
# Lint, format and types, by the tools in .venv: `bash tests/lint.sh`. tests/run.sh calls it before the tests.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ ! -x .venv/bin/mypy ]]; then
    echo "error: .venv has no test tools; bash tests/run.sh installs them" >&2
    exit 2
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
