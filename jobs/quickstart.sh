#!/usr/bin/env bash
# From a machine with Python 3.11+, git and gcc to a leaderboard: makes .venv, installs, runs the digits study.
# Run it again to continue a study that was interrupted. PYTHON=python3.12 picks another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

source jobs/environment.sh ""
.venv/bin/dmlstudy run search_spaces/studies/digits.yaml "$@"
