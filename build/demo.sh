#!/usr/bin/env bash
# From a bare Debian or Ubuntu box to an answer: sets everything up (build/lib.sh says how, and which settings there
# are), then runs a peer and a head on this machine with a small real model. Arguments go to `hydra demo`.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

prepare demo,gpu
exec "$venv/bin/hydra" demo "$@"
