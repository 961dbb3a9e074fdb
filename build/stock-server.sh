#!/usr/bin/env bash
# Builds llama.cpp's own programs (llama-server, ggml-rpc-server, llama-bench) from the source that our wheel is built
# of, with the same options, for benchmarks that measure hydra beside them. Nothing else needs this. The settings are
# those of build/lib.sh. The last line, on stdout, is the folder that holds the programs.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

ensure_system_packages
ensure_venv
choose_backend
complete_toolkit
folder="$cache/stock-server/$llama_version-$backend-$(build_key)"
if [[ ! -f $folder/complete ]]; then
    sdist=$(fetch_sdist)
    mkdir -p "$folder" "$cache/logs"
    exec 9>"$folder/.lock"
    flock --nonblock 9 || { say "another build of the same programs is running; waiting for it"; flock 9; }
    rm -rf "$folder/source" "$folder/work"
    mkdir -p "$folder/source"
    tar -xzf "$sdist" -C "$folder/source" --strip-components=3 "llama_cpp_python-$llama_version/vendor/llama.cpp"
    say "building llama.cpp's programs for this box ($backend): some minutes, once. Options: ${cmake_args[*]}"
    cmake -G Ninja -S "$folder/source" -B "$folder/work" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
        -DLLAMA_OPENSSL=OFF -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON "${cmake_args[@]}" \
        >"$cache/logs/stock-server-configure.log" 2>&1 ||
        fail_with_log "cmake failed" "$cache/logs/stock-server-configure.log"
    "$python" "$root/build/progress.py" --what "llama-server" --log "$cache/logs/stock-server.log" -- \
        cmake --build "$folder/work" --target llama-server ggml-rpc-server llama-bench ||
        fail_build "llama.cpp's programs"
    rm -rf "$folder/source"
    touch "$folder/complete"
fi
printf '%s/bin\n' "$folder/work"
