#!/usr/bin/env bash
# From a bare Debian or Ubuntu box to the test results: sets everything up (build/lib.sh says how, and which settings
# there are), then runs the linter, the type checker and the tests. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

prepare demo,dev,gpu
cd "$root"
failed=()
"$venv/bin/ruff" check . || failed+=(ruff)
"$venv/bin/mypy" || failed+=(mypy)
timeout --foreground --kill-after=30 1h "$python" -m pytest "$@" </dev/null || failed+=(pytest)
((${#failed[@]} == 0)) || fail "failed: ${failed[*]}"
