#!/usr/bin/env bash
# From a machine with Python 3.11+, git and gcc to a report: makes .venv, installs, runs a study of handwritten characters.
# Run it again to continue a study that was interrupted. PYTHON=python3.12 picks another interpreter; arguments go to
# `dmlstudy run`; DMLSTUDY_STORE is another folder for studies and models.
set -euo pipefail
cd "$(dirname "$0")/.."

source jobs/environment.sh ""
.venv/bin/dmlstudy run search_spaces/studies/characters.yaml "$@"
.venv/bin/dmlstudy report characters -o characters.html
