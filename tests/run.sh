#!/usr/bin/env bash
# What must hold: installs the test extra into .venv, then lint, types and tests.
# Without arguments two processes share the tests, each with one thread. Arguments go to pytest instead, which
# is then one process: bash tests/run.sh tests/losses; bash tests/run.sh -m '' runs the long ones too.
set -euo pipefail
cd "$(dirname "$0")/.."

source jobs/environment.sh "[test]"
bash tests/lint.sh
if (($# == 0)); then
    # A test that ends its process ends the run, which would wait for that process's other tests for ever.
    set -- --numprocesses=2 --max-worker-restart=0 --durations=15
    # Threads of two processes would wait for each other in loops on the same cores; what tests threads sets them.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
fi
.venv/bin/python -m pytest "$@"
