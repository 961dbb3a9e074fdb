# What the scripts of this folder share: system packages, the virtual environment, and llama-cpp-python built for this
# box. Sourced, not run. Every step first looks whether there is anything to do, so a second run takes seconds.
#
# Settings (environment):
#   HYDRA_CUDA                 1: build with CUDA; 0: without; unset: with CUDA when an nvcc and a GPU are there
#   HYDRA_CUDA_ARCHITECTURES   CMake's list, "86;120" say. Default: the GPUs of this box; without a GPU 86;120
#   HYDRA_CMAKE_ARGS           further CMake arguments for llama.cpp
#   PYTHON                     the interpreter that makes the environment (default python3; 3.10 or newer)
#   XDG_CACHE_HOME             finished builds are kept under $XDG_CACHE_HOME/hydra (default ~/.cache/hydra)

set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
python="$venv/bin/python"
cache="${XDG_CACHE_HOME:-${HOME:?set HOME or XDG_CACHE_HOME: finished builds are kept there}/.cache}/hydra"

llama_version=0.3.36
llama_sdist="llama_cpp_python-$llama_version.tar.gz"
llama_sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e

# They are for these scripts: hydra itself reads HYDRA_… variables as configuration.
export -n HYDRA_CUDA HYDRA_CUDA_ARCHITECTURES HYDRA_CMAKE_ARGS 2>/dev/null || true

say()  { printf '%s\n' "hydra: $*" >&2; }
fail() { printf '%s\n' "hydra: $*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }
fail_with_log() { tail -n 20 "$2" >&2; fail "$1; the whole log is $2"; }

fail_build() {
    local cuda_hint=""
    [[ $backend == cuda ]] && cuda_hint=" (HYDRA_CUDA=0 builds for the CPU only)"
    fail "$1 could not be built; see above$cuda_hint"
}

# --- 1. what the operating system must have ---------------------------------------------------------------------------

on_debian() { have apt-get && grep -qsE '^(ID|ID_LIKE)=.*(debian|ubuntu)' /etc/os-release; }

apt_install() {
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

# Installs what is missing with apt when root on Debian or Ubuntu; elsewhere says in one line what to install.
ensure_system_packages() {
    local missing=() wanted
    have "${PYTHON:-python3}" || missing+=(python3)
    "${PYTHON:-python3}" -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
    have g++ || missing+=(g++)
    have cmake || missing+=(cmake)
    have ninja || missing+=(ninja-build)
    if ((${#missing[@]})); then
        wanted="${missing[*]}"
        if ! on_debian; then
            fail "please install these, by whatever names your system has for them, and run this again: $wanted"
        elif ((EUID != 0)); then
            fail "please run this first: sudo apt-get install -y $wanted"
        fi
        say "installing $wanted with apt"
        mkdir -p "$cache/logs"
        apt_install "${missing[@]}" >"$cache/logs/apt.log" 2>&1 </dev/null ||
            fail_with_log "apt failed" "$cache/logs/apt.log"
    fi
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "Python 3.10 or newer is needed, and this is $("${PYTHON:-python3}" -V 2>&1). Set PYTHON to a newer one."
}

# --- 2. the virtual environment ---------------------------------------------------------------------------------------

pip_install() {
    "$python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "$@" </dev/null ||
        fail "pip could not install this: $*"
}

# The environment with the tools that build packages in it; they are pinned like everything else, so no build isolation.
ensure_venv() {
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        say "creating $venv"
        "${PYTHON:-python3}" -m venv --clear "$venv" || fail "could not create $venv"
    fi
    local stamp="$venv/hydra-tools.stamp" now
    now=$(sha256sum <"$root/constraints.txt")
    [[ -f $stamp && $(<"$stamp") == "$now" ]] && return
    pip_install pip
    pip_install hatchling scikit-build-core
    printf '%s\n' "$now" >"$stamp"
}

# --- 3. llama.cpp, as llama-cpp-python vendors it ---------------------------------------------------------------------

gpu_here() { [[ -e /dev/nvidia0 ]] || { have nvidia-smi && nvidia-smi -L >/dev/null 2>&1; }; }

find_nvcc() {
    local candidate
    for candidate in "${CUDACXX:-}" "$(command -v nvcc || true)" "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"; do
        [[ -n $candidate && -x $candidate ]] && { printf '%s\n' "$candidate"; return; }
    done
    return 1
}

# Sets `backend` (cpu or cuda) and `cmake_args` (an array), from what is here and what was asked for.
choose_backend() {
    local nvcc="" cuda_floor="12.8 or newer for RTX 50 cards"
    nvcc=$(find_nvcc) || true
    backend=cpu
    case "${HYDRA_CUDA:-auto}" in
        0) ;;
        1)
            [[ $nvcc ]] || fail "HYDRA_CUDA=1, but no nvcc: install the CUDA toolkit ($cuda_floor) or set CUDACXX."
            backend=cuda ;;
        auto)
            if gpu_here && [[ $nvcc ]]; then
                backend=cuda
            elif gpu_here; then
                say "a GPU is here, but no nvcc: building for the CPU only." \
                    "To use the GPU, install the CUDA toolkit ($cuda_floor) and run this again."
            fi ;;
        *) fail "HYDRA_CUDA must be 0 or 1, not '$HYDRA_CUDA'" ;;
    esac
    cmake_args=(-DGGML_RPC=ON -DLLAVA_BUILD=OFF -DGGML_CCACHE=OFF)
    if [[ $backend == cuda ]]; then
        export CUDACXX="$nvcc"
        cmake_args+=(-DGGML_CUDA=ON)
        local architectures="${HYDRA_CUDA_ARCHITECTURES:-}"
        [[ $architectures ]] || gpu_here || architectures="86;120"
        [[ $architectures ]] && cmake_args+=("-DCMAKE_CUDA_ARCHITECTURES=$architectures")
    fi
    local extra=()
    read -r -a extra <<<"${HYDRA_CMAKE_ARGS:-}"
    cmake_args+=("${extra[@]}")
}

# What a CUDA toolkit may lack when only its compiler was installed: cublas, which is then taken from NVIDIA's package of
# it, and the driver's library to link with where no driver is, which is then a library of the names that llama.cpp
# takes from it (the box that runs the program brings the real one). After choose_backend; adds to cmake_args, and sets
# CUDA_LIBRARIES, the folder of both.
complete_toolkit() {
    local toolkit folder cublas_version=13.0.2.14
    [[ $backend == cuda ]] || return 0
    toolkit=$(dirname "$(dirname "$(readlink -f "$CUDACXX")")")
    folder="$cache/cuda-libraries-$cublas_version"
    CUDA_LIBRARIES="$folder/nvidia/cu13/lib"
    if [[ -z $(find -L "$toolkit" /usr/include -name cublas_v2.h -print -quit 2>/dev/null) ]]; then
        "$CUDACXX" --version | grep -q "release 13\." || fail "the CUDA toolkit in $toolkit lacks cublas: install it."
        if [[ ! -f $folder/nvidia/cu13/include/cublas_v2.h ]]; then
            say "the CUDA toolkit in $toolkit lacks cublas: fetching NVIDIA's package of it (421 MB)"
            pip_install --no-deps --target "$folder" "nvidia-cublas==$cublas_version"
        fi
        # A package has the libraries by the names of their versions alone; a linker looks for them without.
        ln -sf libcublas.so.13 "$CUDA_LIBRARIES/libcublas.so"
        ln -sf libcublasLt.so.13 "$CUDA_LIBRARIES/libcublasLt.so"
        cmake_args+=("-DCMAKE_CUDA_FLAGS=-I$folder/nvidia/cu13/include")
    fi
    if [[ -z $(find -L "$toolkit" /usr/lib -name libcuda.so -print -quit 2>/dev/null) ]]; then
        mkdir -p "$CUDA_LIBRARIES"
        if [[ ! -f $CUDA_LIBRARIES/libcuda.so ]]; then
            printf 'void %s(void) {}\n' cuGetErrorString cuDeviceGet cuDeviceGetAttribute cuMemAddressFree \
                cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity cuMemMap cuMemRelease cuMemSetAccess \
                cuMemUnmap | g++ -x c -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$CUDA_LIBRARIES/libcuda.so" -
        fi
        cmake_args+=("-DCUDA_cuda_driver_LIBRARY=$CUDA_LIBRARIES/libcuda.so")
    fi
    if [[ -d $CUDA_LIBRARIES ]]; then cmake_args+=("-DCMAKE_LIBRARY_PATH=$CUDA_LIBRARIES"); fi
}

# Everything that a finished build depends on. The kernels are compiled with -march=native, so the CPU's features count;
# the wheel holds no code for one Python version, so that does not.
build_key() {
    {
        printf '%s\n' "$llama_version" "${cmake_args[@]}"
        grep -v "^#" "$root/build/no-common.cmake"
        grep -m1 -E '^(flags|Features)' /proc/cpuinfo || true
        "${CXX:-g++}" --version | head -n 1
        getconf GNU_LIBC_VERSION || true
        if [[ $backend == cuda ]]; then
            "$CUDACXX" --version | tail -n 2
            nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u || true
        fi
    } | sha256sum | cut -c 1-16
}

# The pinned source archive, fetched once; prints its path.
fetch_sdist() {
    local folder="$cache/sdist"
    if ! echo "$llama_sha256  $folder/$llama_sdist" | sha256sum --check --status 2>/dev/null; then
        mkdir -p "$folder"
        rm -f "$folder/$llama_sdist"
        say "fetching llama-cpp-python $llama_version (77 MB of source)"
        "$python" -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps --no-build-isolation \
            --no-binary llama-cpp-python --dest "$folder" "llama-cpp-python==$llama_version" </dev/null ||
            fail "could not fetch llama-cpp-python $llama_version; is a package index within reach?"
        echo "$llama_sha256  $folder/$llama_sdist" | sha256sum --check --status ||
            fail "$folder/$llama_sdist is not the archive that hydra is pinned to: its SHA-256 differs. Delete it."
    fi
    printf '%s\n' "$folder/$llama_sdist"
}

# ensure_wheel FOLDER: builds the wheel into our own cache unless it is there; prints its path. pip's wheel cache is
# kept out of it: that one does not look at CMAKE_ARGS and would hand back a build without RPC.
ensure_wheel() {
    local folder=$1 sdist
    if ! compgen -G "$folder/*.whl" >/dev/null; then
        sdist=$(fetch_sdist)
        mkdir -p "$folder" "$cache/logs"
        exec 9>"$folder/.lock"
        flock --nonblock 9 || { say "another build of the same wheel is running; waiting for it"; flock 9; }
        if ! compgen -G "$folder/*.whl" >/dev/null; then
            # Unpacked and built in places that stay until it is done: a build that was interrupted goes on from there.
            if [[ ! -d $folder/source ]]; then
                rm -rf "$folder/unpacked" "$folder/work"
                mkdir "$folder/unpacked"
                tar -xzf "$sdist" -C "$folder/unpacked" --strip-components=1
                mv "$folder/unpacked" "$folder/source"
            fi
            rm -rf "$folder/new"
            say "building llama.cpp for this box ($backend): some minutes, once. Options: ${cmake_args[*]}"
            CMAKE_ARGS="${cmake_args[*]} '-DCMAKE_PROJECT_llama_cpp_INCLUDE=$root/build/no-common.cmake'" \
                "$python" "$root/build/progress.py" --what "llama.cpp" --log "$cache/logs/llama-cpp-python.log" -- \
                "$python" -m pip wheel -v --disable-pip-version-check --no-cache-dir --no-deps --no-build-isolation \
                --config-settings "build-dir=$folder/work" --wheel-dir "$folder/new" "$folder/source" ||
                fail_build "llama.cpp"
            mv "$folder"/new/*.whl "$folder/"
            rm -rf "$folder/new" "$folder/source" "$folder/work"
        fi
        exec 9>&-
    fi
    compgen -G "$folder/*.whl" | head -n 1
}

check_llama() { "$python" "$root/build/check_llama.py" "$llama_version" "$backend"; }

install_wheel() {
    pip_install --no-deps --force-reinstall --no-cache-dir "$1"
    pip_install "$1"  # what it depends on
}

# The environment gets our build of llama-cpp-python, checked by asking the library itself.
ensure_llama() {
    local folder kept wheel stamp="$venv/hydra-llama.stamp" log="$cache/logs/llama-cpp-python.log"
    folder="$cache/wheels/$llama_version-$backend-$(build_key)"
    [[ -f $stamp && $(<"$stamp") == "$folder" ]] && check_llama && return
    rm -f "$stamp"
    kept=$(compgen -G "$folder/*.whl" || true)
    wheel=$(ensure_wheel "$folder")
    install_wheel "$wheel"
    if ! check_llama; then
        [[ $kept ]] || fail "llama-cpp-python was built and does not work; see above and $log"
        say "the kept build $wheel is of no use; building it again"
        rm -f "$wheel"
        wheel=$(ensure_wheel "$folder")
        install_wheel "$wheel"
        check_llama || fail "llama-cpp-python was built again and does not work; see above and $log"
    fi
    printf '%s\n' "$folder" >"$stamp"
}

# --- 4. hydra and its Python packages ---------------------------------------------------------------------------------

# ensure_hydra EXTRAS: this checkout, editable, with the named extras of pyproject.toml.
ensure_hydra() {
    local stamp="$venv/hydra-$1.stamp" now
    now=$(cat "$root/constraints.txt" "$root/pyproject.toml" | sha256sum)
    [[ -f $stamp && $(<"$stamp") == "$now" && -x $venv/bin/hydra ]] && return
    say "installing hydra's Python packages ($1)"
    pip_install --no-build-isolation --editable "$root[$1]"
    printf '%s\n' "$now" >"$stamp"
}

# prepare EXTRAS: all of the above.
prepare() {
    ensure_system_packages
    ensure_venv
    choose_backend
    complete_toolkit
    ensure_llama
    ensure_hydra "$1"
}
