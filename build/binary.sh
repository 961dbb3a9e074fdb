#!/usr/bin/env bash
# One file that is all of hydra: dist/hydra, for boxes that have a driver and nothing else.
#
#   bash build/binary.sh         for CPUs: x86-64-v3, whatever this box could do besides
#   bash build/binary.sh cuda    for NVIDIA cards too; runs without driver and card as well, on the CPU
#   bash build/binary.sh FOLDER  with finished libraries of llama.cpp (libllama.so, libggml*.so) in place of a build of
#                                ours; what they need besides (CUDA's runtime, say) is then the box's
#
# The settings are those of build/lib.sh; for cuda, HYDRA_CUDA_ARCHITECTURES is "86;120" if not set (RTX 30 and RTX 50).
# It takes an environment and a build of llama.cpp of its own, so .venv stays as it is. The last line, on stdout, is the
# file. docs/binary.md says what is inside and how it starts.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

variant=${1:-cpu}
libraries=""
HYDRA_CUDA=0
case $variant in
    cpu) ;;
    cuda) HYDRA_CUDA=1 HYDRA_CUDA_ARCHITECTURES=${HYDRA_CUDA_ARCHITECTURES:-86;120} ;;
    *)
        [[ -e $variant/libllama.so ]] || fail "usage: build/binary.sh [cpu|cuda|FOLDER], FOLDER with libllama.so in it"
        libraries=$(cd "$variant" && pwd) variant=own ;;
esac

# Backends as plug-ins (GGML_BACKEND_DL): where no driver is, the one for CUDA cannot be loaded and the CPU's can. The
# CPU's code is for x86-64-v3 and not for this box. Flash attention has kernels for the cache types of
# hydra.toml.example (q8_0) and for f16, bf16 and q4_0 without further options.
portable="-DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF"
for feature in SSE42 AVX AVX2 BMI2 FMA F16C; do portable+=" -DGGML_$feature=ON"; done
[[ $variant == cuda ]] && portable+=" -DGGML_CUDA_NCCL=OFF"
HYDRA_CMAKE_ARGS="$portable ${HYDRA_CMAKE_ARGS:-}"

work="$root/.pyinstaller" # in .gitignore; build/, PyInstaller's default, holds our scripts
venv="$work/venv-${variant/own/cpu}"
python="$venv/bin/python"

# --- 1. an environment with nothing in it but hydra and what it needs -------------------------------------------------

ensure_system_packages
have readelf || fail "please install binutils (readelf is missing) and run this again"
ensure_venv
choose_backend
complete_toolkit
wheel=$(ensure_wheel "$cache/wheels/$llama_version-portable-$backend-$(build_key)")
stamp="$venv/hydra-binary.stamp"
now=$(cat "$root/constraints.txt" "$root/pyproject.toml" <(printf '%s\n' "$wheel") | sha256sum)
if [[ ! -f $stamp || $(<"$stamp") != "$now" ]]; then
    say "installing hydra's Python packages for the one file"
    install_wheel "$wheel"
    pip_install --no-build-isolation --editable "$root[gpu,binary]"
    printf '%s\n' "$now" >"$stamp"
fi
if ! "$python" -c 'from PyInstaller.depend import bindepend; bindepend.get_python_library_path()' 2>/dev/null; then
    package="lib$("$python" -c 'import sys; print("python{}.{}".format(*sys.version_info))')"
    on_debian && ((EUID == 0)) || fail "Python's shared library is missing: sudo apt-get install -y $package"
    say "installing $package with apt"
    apt_install "$package" >"$cache/logs/apt.log" 2>&1 </dev/null || fail_with_log "apt failed" "$cache/logs/apt.log"
fi

# --- 2. the program, as a folder --------------------------------------------------------------------------------------

version=$("$python" -c 'import hydra; print(hydra.__version__)')
commit=$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)
cuda_list="" cpu=x86-64-v3
[[ $libraries ]] && cpu=""
if [[ $backend == cuda ]]; then
    cuda_list=$HYDRA_CUDA_ARCHITECTURES
    CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$CUDACXX")")") # its runtime goes into the file
    export CUDA_HOME CUDA_LIBRARIES
fi
cat >"$work/build-info.json" <<END
{"variant": "$variant", "commit": "$commit", "cpu": "$cpu", "cuda_architectures": "$cuda_list"}
END
say "packing the program ($variant)"
mkdir -p "$cache/logs"
rm -rf "$work/out"
# The hash seed is part of what PyInstaller writes: fixed, the same source gives the same file.
PYTHONHASHSEED=0 HYDRA_BUILD_INFO="$work/build-info.json" HYDRA_LIBRARIES=$libraries \
    "$python" -m PyInstaller --noconfirm --log-level WARN \
    --workpath "$work/work-$variant" --distpath "$work/out" "$root/pyinstaller.spec" \
    >"$cache/logs/pyinstaller.log" 2>&1 </dev/null || fail_with_log "PyInstaller failed" "$cache/logs/pyinstaller.log"
program="$work/out/hydra"

# --- 3. one file: a script that unpacks it once (binary_stub.sh), and the archive -------------------------------------

"$python" "$root/build/binary_files.py" pack "$program" "$root/dist/hydra" "$version for $variant"
"$python" "$root/build/binary_files.py" sizes "$program" >&2
say "dist/hydra: $(($(stat -c %s "$root/dist/hydra") / 1000000)) MB as a file"
if ! "$root/dist/hydra" version >&2; then
    [[ $libraries ]] || fail "$root/dist/hydra was built and does not start"
    say "these libraries do not run on this box; try the file where they do"
fi
printf '%s\n' "$root/dist/hydra"
