"""build/binary_files.py and build/binary_stub.sh: which libraries are taken, and how the one file unpacks and starts.

The program in the file is a shell script here, so no build is needed; tests/test_binary.py tries the real one.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "build" / "binary_files.py"
_spec = importlib.util.spec_from_file_location("binary_files", SCRIPT)
assert _spec is not None and _spec.loader is not None
binary_files = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(binary_files)

# --- libraries ---

LINKED = {
    "libllama.so": ["libggml.so.0", "libggml-base.so.0", "libstdc++.so.6", "libm.so.6", "libc.so.6"],
    "libggml.so.0": ["libggml-cpu.so.0", "libggml-rpc.so.0", "libggml-base.so.0", "ld-linux-x86-64.so.2"],
    "libggml-base.so.0": ["libc.so.6"],
    "libggml-cpu.so.0": ["libggml-base.so.0", "libgomp.so.1"],
    "libggml-rpc.so.0": ["libggml-base.so.0"],
}
PLUGINS = {
    "libllama.so": ["libggml.so.0", "libggml-base.so.0"],
    "libggml.so.0": ["libggml-base.so.0"],
    "libggml-base.so.0": ["libc.so.6"],
    "libggml-cpu.so": ["libggml-base.so.0", "libgomp.so.1"],
    "libggml-rpc.so": ["libggml-base.so.0"],
    "libggml-cuda.so": ["libggml-base.so.0", "libcudart.so.13", "libcublas.so.13", "libcuda.so.1"],
}


def make(folder: Path, table: dict[str, list[str]]):
    """A wheel's lib folder: each library three times. Returns what answers for readelf."""
    for name in table:
        stem = name.removesuffix(".0")
        for each in (stem, f"{stem}.0", f"{stem}.0.25.3"):
            (folder / each).touch()
    return lambda path: table.get(path.name) or table[path.name.removesuffix(".0")]


def test_of_a_linked_build_each_library_is_taken_once_under_its_loaded_name(tmp_path):
    ours, outside = binary_files.llama_libraries(tmp_path, make(tmp_path, LINKED))
    assert {path.name for path in ours} == set(LINKED)
    assert outside == ["libgomp.so.1", "libstdc++.so.6"]  # neither glibc nor the driver


def test_of_a_build_with_plugins_the_backends_are_taken_as_ggml_opens_them(tmp_path):
    ours, outside = binary_files.llama_libraries(tmp_path, make(tmp_path, PLUGINS))
    assert {path.name for path in ours} == set(PLUGINS)
    assert outside == ["libcublas.so.13", "libcudart.so.13", "libgomp.so.1"]


@pytest.mark.parametrize("missing", ["libllama.so", "libggml-base.so.0", "libggml-rpc.so.0"])
def test_a_build_with_something_missing_is_refused(tmp_path, missing):
    ask = make(tmp_path, LINKED)
    (tmp_path / missing).unlink()
    if missing == "libggml-rpc.so.0":
        LACKING = {**LINKED, "libggml.so.0": ["libggml-cpu.so.0"]}
        (tmp_path / "libggml-rpc.so").unlink()
        ask = lambda path: LACKING[path.name]  # noqa: E731
    with pytest.raises(FileNotFoundError, match=missing.removesuffix(".0").removesuffix(".so")):
        binary_files.llama_libraries(tmp_path, ask)


def test_what_they_need_from_the_system_is_found_with_what_that_needs(tmp_path):
    first = tmp_path / "cuda"
    first.mkdir()
    for name in ("libcublas.so.13", "libcublasLt.so.13"):
        (first / name).touch()
    table = {"libcublas.so.13": ["libcublasLt.so.13", "libcuda.so.1", "libc.so.6"], "libcublasLt.so.13": []}
    found = binary_files.locate(["libcublas.so.13"], [first], lambda path: table[path.name])
    assert [path.name for path in found] == ["libcublas.so.13", "libcublasLt.so.13"]
    with pytest.raises(FileNotFoundError, match=r"libnowhere\.so\.1"):
        binary_files.locate(["libnowhere.so.1"], [first])


def test_the_glibc_floor_is_read_from_the_files(tmp_path):
    (tmp_path / "true").write_bytes(Path(sys.executable).resolve().read_bytes())
    (tmp_path / "notes").write_text("GLIBC_2.99")
    major, minor = binary_files.glibc_floor(tmp_path)
    assert major == 2 and 2 <= minor < 99
    assert sum(binary_files.sizes(tmp_path).values()) == sum(p.stat().st_size for p in tmp_path.iterdir())


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to make a library with")
def test_no_library_looks_for_others_in_a_folder_of_the_build(tmp_path):
    """On the box where it runs, another user might own a folder of that name."""
    for name, places in (("a.so", "/home/me/build:$ORIGIN/x"), ("b.so", "/home/me/build"), ("c.so", "$ORIGIN")):
        subprocess.run(["g++", "-shared", "-nostdlib", "-x", "c++", "-", f"-Wl,-rpath,{places}", "-o", tmp_path / name],
                       input=b"extern \"C\" int f() { return 7; }", check=True)
    (tmp_path / "notes").write_text("/home/me/build")
    binary_files.forget_build_folders(tmp_path)
    found = {name: binary_files.search_path(tmp_path / name) for name in ("a.so", "b.so", "c.so")}
    assert found == {"a.so": ["$ORIGIN/x"], "b.so": [], "c.so": ["$ORIGIN"]}
    assert all(ctypes.CDLL(str(tmp_path / name)).f() == 7 for name in found)


# --- the file ---


class Box:
    """A home, and files made of programs that are shell scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.programs = self.home / ".cache" / "hydra" / "bin"
        self.home.mkdir()

    def make(self, code: str, name: str = "hydra") -> Path:
        program = self.folder / f"{name}.d"
        (program / "_internal").mkdir(parents=True)
        (program / "_internal" / "link").symlink_to("../hydra")
        (program / "_internal" / "data").write_bytes(os.urandom(1 << 20))  # so that half a file is less than all
        (program / "hydra").write_text(f"#!/bin/sh\n{code}\n")
        (program / "hydra").chmod(0o755)
        file = self.folder / name
        binary_files.pack(program, file, f"{name} for tests")
        return file

    def env(self, **more: str) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self.home), **more}

    def run(self, file: Path | str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(file), *arguments], env=self.env(**more), capture_output=True, text=True,
                              timeout=60, stdin=subprocess.DEVNULL, cwd=self.folder)

    def unpacked(self) -> list[str]:
        return sorted(path.name for path in self.programs.iterdir() if path.name != ".lock")


@pytest.fixture
def box(tmp_path):
    return Box(tmp_path)


def test_it_unpacks_once_and_passes_everything_through(box):
    file = box.make('printf "%s|" "$@"; echo; echo "$_HYDRA_FILE"; exit 7')
    first = box.run(file, "a b", "", "$c")
    assert (first.returncode, first.stdout) == (7, f"a b||$c|\n{file}\n")
    assert "unpacking hydra for tests" in first.stderr and len(box.unpacked()) == 1
    second = box.run("./hydra", "x")
    assert (second.returncode, second.stdout, second.stderr) == (7, f"x|\n{box.folder}/./hydra\n", "")


def test_it_is_found_on_the_path_and_through_a_link(box):
    box.make("echo started")
    (box.folder / "bin").mkdir()
    (box.folder / "bin" / "hy").symlink_to(box.folder / "hydra")
    assert box.run("hy", PATH=f"{box.folder}/bin:{os.environ['PATH']}").stdout == "started\n"


def test_it_is_the_process_that_it_starts(box):
    process = subprocess.Popen([str(box.make("echo $$; exec sleep 30"))], env=box.env(), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid  # so a signal reaches hydra itself
    finally:
        process.kill()
        process.communicate()


def test_the_same_content_is_the_same_file(box):
    program = box.folder / "hydra.d"
    first = box.make("echo").read_bytes()
    os.utime(program / "hydra", (1, 1))
    binary_files.pack(program, box.folder / "again", "hydra for tests")
    assert (box.folder / "again").read_bytes() == first


def test_starts_at_the_same_moment_unpack_once(box):
    file = box.make("echo started")
    running = [subprocess.Popen([str(file)], env=box.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for _ in range(4)]
    answers = [process.communicate(timeout=60) for process in running]
    assert [out for out, _ in answers] == ["started\n"] * 4
    assert sum("unpacking" in err for _, err in answers) == 1 and len(box.unpacked()) == 1


def test_a_damaged_file_says_so_and_leaves_nothing(box):
    file = box.make("echo started")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    done = box.run(file)
    assert done.returncode == 71 and "damaged or not complete" in done.stderr and box.unpacked() == []
    file.write_bytes(data)
    assert box.run(file).stdout == "started\n"


def test_what_a_killed_start_left_is_removed_by_the_next(box):
    file = box.make("echo started")
    (box.programs / ".new.123" / "_internal").mkdir(parents=True)
    (box.programs / ".new.123" / "hydra").touch()
    assert box.run(file).stdout == "started\n"
    assert len(box.unpacked()) == 1 and ".new.123" not in box.unpacked()


def test_a_start_killed_while_it_unpacks_leaves_no_program(box, tmp_path):
    """tar is made to wait, and the whole group is killed in the middle."""
    file = box.make("echo started")
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "tar").write_text("#!/bin/sh\ntouch \"$4/hydra\"\nsleep 60\n")
    (slow / "tar").chmod(0o755)
    process = subprocess.Popen([str(file)], env=box.env(PATH=f"{slow}:{os.environ['PATH']}"), start_new_session=True,
                               stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (box.programs.is_dir() and box.unpacked()) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert all(name.startswith(".new.") for name in box.unpacked())
    assert box.run(file).stdout == "started\n" and len(box.unpacked()) == 1


def test_another_version_goes_unless_it_runs(box):
    old, new = box.make("echo old", "old"), box.make("echo new", "new")
    box.run(old)
    (folder,) = box.unpacked()
    lock = os.open(box.programs / folder, os.O_RDONLY)  # as build/binary_start.py does in every process
    fcntl.flock(lock, fcntl.LOCK_SH)
    assert box.run(new).stdout == "new\n" and len(box.unpacked()) == 2
    os.close(lock)
    box.run(box.make("echo newest", "newest"))
    assert len(box.unpacked()) == 1


@pytest.mark.parametrize(("replace", "words"), [
    (("glibc_minor=", "glibc_minor=99 #"), "2.99 or newer is needed"),
    (("x86_64 ]", "x86_65 ]"), "this file is for x86-64"),
    (("for flag in avx2", "for flag in avx99"), "this CPU has no avx99"),
])
def test_a_box_that_cannot_run_it_is_told_why(box, replace, words):
    file = box.make("echo started")
    old, new = replace
    data = file.read_bytes()
    assert old.encode() in data
    file.write_bytes(data.replace(old.encode(), new.encode(), 1))
    done = box.run(file)
    assert done.returncode == 71 and words in done.stderr and not box.programs.exists()


def test_without_a_home_it_says_what_is_missing(box):
    file = box.make("echo started")
    assert "neither HOME nor XDG_CACHE_HOME" in box.run(file, HOME="").stderr
    cache = box.folder / "cache"
    assert box.run(file, HOME="", XDG_CACHE_HOME=str(cache)).stdout == "started\n"
    assert (cache / "hydra" / "bin").is_dir()
    (box.folder / "taken").touch()
    assert "set XDG_CACHE_HOME" in box.run(file, XDG_CACHE_HOME=str(box.folder / "taken")).stderr


def test_the_script_knows_its_kinds_and_refuses_others(tmp_path):
    script = SCRIPT.with_name("binary.sh")
    assert subprocess.run(["/bin/bash", "-n", str(script)]).returncode == 0
    for wrong in ("metal", str(tmp_path)):  # neither a kind nor a folder with llama.cpp's libraries
        done = subprocess.run(["/bin/bash", str(script), wrong], capture_output=True, text=True, timeout=30)
        assert done.returncode == 1 and "usage: build/binary.sh [cpu|cuda|FOLDER]" in done.stderr


def test_of_a_folder_with_finished_libraries_nothing_is_built_for_cards(tmp_path):
    (tmp_path / "libllama.so").touch()
    text = SCRIPT.with_name("binary.sh").read_text()
    begin, end = text.index("variant=${1"), text.index("# Backends as plug-ins")
    code = f'{text[begin:end]}echo "$variant $HYDRA_CUDA $libraries"'
    done = subprocess.run(["/bin/bash", "-c", code, "binary.sh", "."], capture_output=True, text=True, timeout=30,
                          cwd=tmp_path)
    assert done.stdout == f"own 0 {tmp_path}\n"


@pytest.mark.parametrize(("kind", "more"), [
    ("cpu", []),
    ("cuda", ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=86;120", "-DGGML_CUDA_NCCL=OFF"]),
])
def test_llama_cpp_is_built_for_other_boxes_than_this(kind, more, tmp_path):
    """The options, from the script itself: up to where the build would begin, with an nvcc that only exists."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 13.0\n")
    nvcc.chmod(0o755)
    text = SCRIPT.with_name("binary.sh").read_text()
    begin, end = text.index("variant=${1"), text.index("work=")
    lib = SCRIPT.with_name("lib.sh")
    code = f'source "{lib}"\n{text[begin:end]}\nchoose_backend\nprintf "%s\\n" "${{cmake_args[@]}}"'
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CUDACXX": str(nvcc)}
    done = subprocess.run(["/bin/bash", "-c", code, "binary.sh", kind], env=env, capture_output=True, text=True,
                          timeout=30)
    options = done.stdout.split()
    wanted = {"-DGGML_RPC=ON", "-DGGML_BACKEND_DL=ON", "-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", *more}
    assert wanted <= set(options), done.stderr
    assert ("-DGGML_CUDA=ON" in options) == (kind == "cuda")
