#!/usr/bin/env bash
# The reference run on a real GPU, one command and under nine minutes: a synthetic 27B-shaped model with its MTP block,
# split over a peer and a head, with the stock peer, hydra's and none in turn. A table at the end, all figures in one JSON.
#
#   bash build/gpu_bench.sh                     speed: hydra heads and llama-server, MTP on and off
#   bash build/gpu_bench.sh loads checks        cold and warm loads against the floor; correctness, leaks, a killed worker
#   bash build/gpu_bench.sh --help              shapes, devices, lengths, the time allowed
#
# Needs: llama.cpp's CUDA libraries (LLAMA_CPP_LIB_PATH or an installed llama-cpp-python), llama-server on the PATH or
# beside them for that part, and Python with numpy, psutil and gguf. Results are merged into $OUT/gpu_bench.json.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}
if [[ -z $python ]]; then
    if [[ -x $root/.venv/bin/python && -z ${LLAMA_CPP_LIB_PATH:-} ]]; then python=$root/.venv/bin/python; else python=python3; fi
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$python" "$root/build/gpu_bench.py" "$@"
