# Sourced with an extra ("" or "[test]"): makes .venv or brings it up to date, from the repository's root.
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
    echo "error: $python is not Python 3.11, 3.12 or 3.13; install one and name it: PYTHON=python3.12 bash $0" >&2
    exit 2
fi
stamp=.venv/.installed$1
if [[ ! -e $stamp || pyproject.toml -nt $stamp ]]; then
    echo "installing into .venv (about 7 GB, minutes; the log is .venv/install.log)"
    [[ -x .venv/bin/python ]] || "$python" -m venv .venv
    if ! .venv/bin/python -m pip install --quiet --no-compile --editable ".$1" >.venv/install.log 2>&1; then
        tail -n 20 .venv/install.log >&2
        echo "error: the installation failed, see .venv/install.log" >&2
        exit 1
    fi
    # On all cores, which pip does not; without the packages' own tests. A file that is no Python of today is none of ours.
    .venv/bin/python -m compileall -q -j 0 -x '/tests?/' .venv/lib >/dev/null 2>&1 || true
    touch "$stamp"
fi
