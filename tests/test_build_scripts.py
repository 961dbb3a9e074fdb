"""The scripts of build/, as far as they can be tried without building: choices, cache key, pins, and what CI runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build"
PINS = dict(
    line.split(";")[0].split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture
def bash(tmp_path):
    """Runs bash code with build/lib.sh sourced, an empty cache, and only the given HYDRA_ settings."""

    def run(code: str, path: str | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
        ours = ("HYDRA_", "CUDA", "PYTHON", "CXX")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), **settings}
        if path is not None:
            environment["PATH"] = path
        return subprocess.run(
            ["/bin/bash", "-c", f'source "{BUILD}/lib.sh"\n{code}'],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30,
        )  # fmt: skip

    return run


@pytest.fixture
def bare_path(tmp_path):
    """A PATH with the few programs that lib.sh itself needs, and whatever the test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "cat", "grep", "sha256sum", "cut", "head", "tail", "sort", "getconf", "mkdir"):
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return folder


def fake(folder: Path, name: str, code: str = "exit 0") -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{code}\n")
    program.chmod(0o755)


# --- pins ---


def test_every_pin_is_exact_and_no_index_is_named():
    text = (ROOT / "constraints.txt").read_text()
    exact = re.compile(r"[a-z0-9][a-z0-9._-]*==[0-9][0-9A-Za-z.+!-]*(; python_version .*)?")
    for line in text.splitlines():
        assert line.startswith("#") or exact.fullmatch(line), line
    assert "://" not in text


def test_every_package_that_we_name_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = list(project["build-system"]["requires"]) + list(project["project"]["dependencies"])
    for extra in project["project"]["optional-dependencies"].values():
        named += extra
    missing = [name for name in (canonical(re.split(r"[ <>=!;\[]", item, maxsplit=1)[0]) for item in named)
               if name not in PINS]  # fmt: skip
    assert not missing, f"add to constraints.txt: {missing}"


def test_one_version_of_llama_cpp_everywhere():
    version = re.search(r"^llama_version=(\S+)$", (BUILD / "lib.sh").read_text(), re.MULTILINE)
    assert version is not None
    assert version[1] == PINS["llama-cpp-python"]
    assert f'"llama-cpp-python=={version[1]}"' in (ROOT / "pyproject.toml").read_text()


# --- the scripts ---


@pytest.mark.parametrize("script", [*sorted(BUILD.glob("*.sh")), ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_the_scripts_are_bash(script):
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr


def test_ci_runs_what_a_user_runs_and_nothing_else():
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "${BASH_SOURCE[0]}")/.."', "bash build/test.sh"]


SHOW = 'choose_backend; printf "%s\\n" "$backend" "${cmake_args[@]}"'


def test_without_a_gpu_the_build_is_for_the_cpu_and_has_rpc(bash):
    shown = bash(SHOW, HYDRA_CUDA="0")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[0] == "cpu"
    assert "-DGGML_RPC=ON" in shown.stdout
    assert "CUDA" not in shown.stdout


def test_cuda_by_itself_needs_a_compiler_and_a_gpu(bash, bare_path):
    fake(bare_path, "nvidia-smi", "echo 'GPU 0: pretend'")
    gpu_only = bash(SHOW, path=str(bare_path), CUDA_HOME="/nowhere")
    assert gpu_only.stdout.splitlines()[0] == "cpu"
    assert "no nvcc" in gpu_only.stderr, "a GPU left unused is said"
    fake(bare_path, "nvcc")
    both = bash(SHOW, path=str(bare_path), CUDA_HOME="/nowhere")
    assert both.stdout.splitlines()[0] == "cuda"
    assert "-DGGML_CUDA=ON" in both.stdout
    assert "ARCHITECTURES" not in both.stdout, "the GPUs of this box"
    off = bash(SHOW, path=str(bare_path), CUDA_HOME="/nowhere", HYDRA_CUDA="0")
    assert off.stdout.splitlines()[0] == "cpu"


def test_cuda_on_request(bash, bare_path):
    without = bash(SHOW, path=str(bare_path), CUDA_HOME="/nowhere", HYDRA_CUDA="1")
    assert without.returncode == 1
    assert "HYDRA_CUDA=1" in without.stderr and "nvcc" in without.stderr
    fake(bare_path, "nvcc")
    fake(bare_path, "nvidia-smi", "exit 1")
    chosen = bash(SHOW, path=str(bare_path), CUDA_HOME="/nowhere", HYDRA_CUDA="1", HYDRA_CUDA_ARCHITECTURES="90")
    assert "-DCMAKE_CUDA_ARCHITECTURES=90" in chosen.stdout
    if not Path("/dev/nvidia0").exists():
        default = bash(SHOW, path=str(bare_path), CUDA_HOME="/nowhere", HYDRA_CUDA="1")
        assert "-DCMAKE_CUDA_ARCHITECTURES=86;120" in default.stdout


def toolkit(folder: Path, *, whole: bool) -> Path:
    """A CUDA toolkit as far as the scripts look at it; without cublas and the driver's stub where only nvcc was got."""
    (folder / "bin").mkdir(parents=True)
    fake(folder / "bin", "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    if whole:
        for name in ("include/cublas_v2.h", "lib64/stubs/libcuda.so"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    return folder


COMPLETE = 'pip_install() { mkdir -p "$3/nvidia/cu13/include" "$3/nvidia/cu13/lib"; echo "pip $*" >&2; }\n' \
           'choose_backend; n=${#cmake_args[@]}; complete_toolkit; printf "%s\n" "${cmake_args[@]:n}"'  # fmt: skip


def test_a_whole_toolkit_is_left_alone(bash, tmp_path):
    shown = bash(COMPLETE, HYDRA_CUDA="1", CUDACXX=str(toolkit(tmp_path / "cuda", whole=True) / "bin/nvcc"))
    assert shown.returncode == 0 and not shown.stdout.strip() and "pip" not in shown.stderr


@pytest.mark.skipif(Path("/usr/include/cublas_v2.h").exists(), reason="this box has cublas")
def test_a_compiler_alone_is_completed(bash, tmp_path):
    shown = bash(COMPLETE, HYDRA_CUDA="1", CUDACXX=str(toolkit(tmp_path / "cuda", whole=False) / "bin/nvcc"))
    assert shown.returncode == 0, shown.stderr
    assert "nvidia-cublas==13." in shown.stderr
    options = dict(line.split("=", 1) for line in shown.stdout.split())
    assert options["-DCMAKE_CUDA_FLAGS"].endswith("/cu13/include")
    libraries = Path(options["-DCMAKE_LIBRARY_PATH"])
    assert (libraries / "libcublas.so").readlink() == Path("libcublas.so.13")
    driver = subprocess.run(["readelf", "-d", "--dyn-syms", "-W", str(libraries / "libcuda.so")],
                            capture_output=True, text=True, check=True).stdout  # fmt: skip
    assert "soname: [libcuda.so.1]" in driver and "cuMemCreate" in driver


def test_without_cuda_no_toolkit_is_looked_for(bash):
    shown = bash(COMPLETE, HYDRA_CUDA="0", PATH="/usr/bin:/bin")
    assert shown.returncode == 0 and not shown.stdout.strip()


def test_a_wrong_setting_is_refused(bash):
    refused = bash(SHOW, HYDRA_CUDA="yes")
    assert refused.returncode == 1
    assert "'yes'" in refused.stderr


def test_the_build_settings_do_not_leak_into_hydra(bash):
    shown = bash("choose_backend; export -p", HYDRA_CUDA="0", HYDRA_CMAKE_ARGS="-DGGML_OPENMP=OFF")
    assert shown.returncode == 0
    assert "HYDRA_" not in shown.stdout and "XDG_CACHE_HOME" in shown.stdout


def test_the_cache_key_follows_the_options(bash):
    def key(**settings: str) -> str:
        shown = bash("choose_backend; build_key", HYDRA_CUDA="0", **settings)
        assert re.fullmatch(r"[0-9a-f]{16}\n", shown.stdout), shown.stderr
        return shown.stdout

    assert key() == key()
    assert key() != key(HYDRA_CMAKE_ARGS="-DGGML_OPENMP=OFF")


def test_the_cache_key_follows_the_compiler(bash, bare_path):
    def key(version: str) -> str:
        fake(bare_path, "g++", f"echo {version}")
        shown = bash("choose_backend; build_key", path=str(bare_path), HYDRA_CUDA="0")
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    assert key("12.2") != key("13.1")


MISSING = "on_debian() { return 1; }; ensure_system_packages"


def test_missing_packages_elsewhere_are_one_clear_line(bash, bare_path):
    fake(bare_path, "python3", "exit 1")
    shown = bash(MISSING, path=str(bare_path))
    assert shown.returncode == 1
    (line,) = shown.stderr.splitlines()
    assert line.endswith("python3-venv g++ cmake ninja-build")


def test_an_old_python_is_refused_by_name(bash, bare_path):
    fake(bare_path, "python3", 'case "$*" in *version_info*) exit 1;; -V) echo Python 3.8.10;; esac')
    for name in ("g++", "cmake", "ninja"):
        fake(bare_path, name)
    shown = bash(MISSING, path=str(bare_path))
    assert shown.returncode == 1
    assert "3.10" in shown.stderr and "3.8.10" in shown.stderr


def test_the_library_that_is_installed_passes_its_own_check():
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("llama-cpp-python")
    except PackageNotFoundError:
        pytest.skip("llama-cpp-python is not installed")
    check = [sys.executable, str(BUILD / "check_llama.py")]
    good = subprocess.run([*check, PINS["llama-cpp-python"], "cpu"], capture_output=True, text=True, timeout=60)
    assert good.returncode == 0, good.stderr
    other = subprocess.run([*check, "0.0.1", "cpu"], capture_output=True, text=True, timeout=60)
    assert other.returncode == 1
    assert "needs exactly 0.0.1" in other.stderr


# --- which build ends up in .venv: the steps replaced by ones that say what they do ---

STUBS = """
venv="$XDG_CACHE_HOME/venv"; mkdir -p "$venv"; backend=cpu; cmake_args=()
build_key() { echo 0123456789abcdef; }
ensure_wheel() {
    mkdir -p "$1"; [[ -f $1/a.whl ]] || { echo build >>"$venv/steps"; touch "$1/a.whl"; }; echo "$1/a.whl"
}
install_wheel() { [[ -f $1 ]] && echo install >>"$venv/steps"; }
check_llama() { [[ $(wc -l <"$venv/steps") -ge $works_after ]]; }
touch "$venv/steps"
"""


def steps(shown):
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.split()


def test_a_second_run_installs_nothing_even_without_the_kept_wheel(bash):
    shown = bash(f'{STUBS} works_after=2; ensure_llama; rm -r "$cache/wheels"; ensure_llama; cat "$venv/steps"')
    assert steps(shown) == ["build", "install"]


def test_a_kept_wheel_of_no_use_is_built_again_once(bash):
    kept = 'ensure_wheel "$cache/wheels/0.3.36-cpu-0123456789abcdef" >&2'
    shown = bash(f'{STUBS} {kept}; works_after=4; ensure_llama; cat "$venv/steps"')
    assert steps(shown) == ["build", "install", "build", "install"]
    assert "of no use" in shown.stderr


def test_a_new_build_that_does_not_work_is_an_error_and_leaves_no_stamp(bash):
    shown = bash(f"{STUBS} works_after=99; ensure_llama")
    assert shown.returncode == 1
    assert "does not work" in shown.stderr
    assert bash('cd "$XDG_CACHE_HOME/venv"; ls; cat steps').stdout.split() == ["steps", "build", "install"]


def test_another_build_put_into_the_environment_is_replaced(bash):
    assert steps(bash(f'{STUBS} works_after=2; ensure_llama; cat "$venv/steps"')) == ["build", "install"]
    again = bash(f'{STUBS} works_after=3; ensure_llama; cat "$venv/steps"')
    assert steps(again) == ["build", "install", "install"]


def test_a_failure_inside_a_step_stops_the_script(bash):
    shown = bash('python=/bin/false; fetch_sdist() { fail "no source"; }; cmake_args=(); backend=cpu; '
                 'ensure_wheel "$cache/wheels/x"; echo went on')  # fmt: skip
    assert shown.returncode == 1
    assert "no source" in shown.stderr
    assert "went on" not in shown.stdout
