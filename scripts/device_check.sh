#!/usr/bin/env bash
# What only a machine with a CUDA GPU can tell: the tests marked `cuda`, and how fast collection is with many lanes.
#
#     scripts/device_check.sh
#
# Prints the machine, the tests' results (skipped ones with their reasons) and the benchmark's figures, within five
# minutes once the packages are there. Ends with the status of the tests; 2 where they cannot run at all.
#
# Python is, in this order:
#
#   1. that of $VENV (build/device-venv), or of .venv, if its torch sees a GPU and all that the tests need is there;
#   2. $PYTHON (python3), if its torch sees a GPU: $VENV is made on top of it, and only what it lacks is installed.
#      Without a network nothing can be, and nothing needs to be if it has the rest too: the package is then used from
#      src/ as it stands;
#   3. $PYTHON, in a new $VENV with torch from the package index, whose build for Linux has CUDA. This takes minutes.
#
# Versions are those of constraints.txt, except for a torch that is there already.

set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-build/device-venv}
TEST_SECONDS=${TEST_SECONDS:-210}
BENCH_SECONDS=${BENCH_SECONDS:-60}
PIP_OPTIONS=(--quiet --disable-pip-version-check --retries 1 --timeout 10)
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"

say() { printf '\n## %s\n\n' "$*"; }

stop() {
    printf '%s\n' "$*" >&2
    exit 2
}

sees_a_gpu() {
    "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

# prints the modules that cannot be imported
lacking() {
    "$1" - <<'END'
import importlib.util

needed = "torch tensordict gymnasium numpy pytest pytest_timeout"
print(*[name for name in needed.split() if importlib.util.find_spec(name) is None])
END
}

is_ready() {
    [[ -x $1 ]] && sees_a_gpu "$1" && [[ -z $(lacking "$1") ]]
}

make_venv() { # the options of venv
    [[ ! -e $VENV || -f $VENV/pyvenv.cfg ]] || stop "$VENV is there, and no virtual environment; VENV= names another."
    rm -rf "$VENV"
    "$PYTHON" -m venv "$@" "$VENV" || "$PYTHON" -m venv --without-pip "$@" "$VENV"
}

choose_python() {
    for python in "$VENV/bin/python" .venv/bin/python; do
        if is_ready "$python"; then return; fi
    done
    python=$VENV/bin/python
    command -v "$PYTHON" >/dev/null || stop "There is no $PYTHON here; PYTHON= names another."
    if sees_a_gpu "$PYTHON"; then
        make_venv --system-site-packages
        if [[ -n $(lacking "$python") ]]; then
            grep -v '^torch==' constraints.txt >"$VENV/constraints.txt"
            "$python" -m pip install "${PIP_OPTIONS[@]}" -c "$VENV/constraints.txt" -e '.[dev]' ||
                echo "Nothing could be installed; trying with what there is." >&2
        fi
    else
        make_venv
        # torch first and by itself, at the pinned version: resolved among the others it could be another build
        { "$python" -m pip install "${PIP_OPTIONS[@]}" -c constraints.txt torch &&
            "$python" -m pip install "${PIP_OPTIONS[@]}" -c constraints.txt -e '.[dev]'; } ||
            stop "$PYTHON has no torch that sees a GPU, and one could not be installed."
    fi
    local missing
    missing=$(lacking "$python")
    [[ -z $missing ]] || stop "The tests need what $python does not have: $missing."
    sees_a_gpu "$python" || stop "The torch of $python sees no CUDA device: there is nothing to check here."
}

choose_python

say "The machine"
"$python" - <<'END'
import os
import sys

import gymnasium
import tensordict
import torch

print(f"Python {sys.version.split()[0]} ({sys.executable}), {len(os.sched_getaffinity(0))} cores")
print(f"torch {torch.__version__}, tensordict {tensordict.__version__}, gymnasium {gymnasium.__version__}")
for index in range(torch.cuda.device_count()):
    form = torch.cuda.get_device_properties(index)
    print(f"cuda:{index} {form.name}, {form.total_memory >> 30} GiB")
END

say "Tests that need CUDA"
mapfile -t files < <(grep -rl --include='test_*.py' 'pytest\.mark\.cuda' tests | sort)
[[ ${#files[@]} -gt 0 ]] || stop "No test is marked cuda."
tests=0
timeout --signal=INT --kill-after=20 "$TEST_SECONDS" \
    "$python" -m pytest -m cuda -rsfE --durations=5 -p no:cacheprovider -p no:hypothesispytest "${files[@]}" || tests=$?
[[ $tests -ne 124 && $tests -ne 137 ]] || echo "They did not end within $TEST_SECONDS seconds (TEST_SECONDS=)."

say "Frames per second beside a hand-written loop, on one core"
timeout --kill-after=10 "$BENCH_SECONDS" "$python" benchmarks/single_process.py --rounds 3 --seconds 0.3 \
    random-1 mlp-1 tensordict-1 record-1 mlp-4 mlp-16 mlp-64 record-4 record-16 record-64 record-idle-image-8 ||
    echo "The benchmark did not end well (status $?)."

exit "$tests"
