"""Which libraries go into the one file, and what they ask of the box that it runs on. pyinstaller.spec imports this.

llama.cpp's libraries are taken by the names under which they are loaded, one copy each (a wheel holds three):
libllama.so is opened by llama_cpp, the `.so.0` names are what the libraries ask for among themselves, and of a build
with GGML_BACKEND_DL the backends are opened as libggml-NAME.so. What they need beyond that and glibc (libgomp,
libstdc++, CUDA's runtime) comes along; the GPU driver never does: it belongs to the box.

    python build/binary_files.py pack DIRECTORY FILE VERSION    the program of DIRECTORY as one file that unpacks itself
    python build/binary_files.py sizes DIRECTORY                what it is made of, largest first

Needs binutils' readelf, and to pack, patchelf. Knows nothing of PyInstaller.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

# Of every glibc system, so never brought along: it must be that of the box, which the dynamic loader belongs to.
GLIBC = re.compile(r"(ld-linux-x86-64|libc|libm|libdl|libpthread|librt|libutil|libresolv|libanl)\.so(\.\d+)*")
DRIVER = re.compile(r"lib(cuda|nvidia-ml|nvcuvid)\.so(\.\d+)*")
COMPILER = re.compile(r"lib(gcc_s|gomp|stdc\+\+)\.so")
PARTS = (
    ("CUDA's runtime", re.compile(r"lib(cudart|cublas|cublasLt|nccl)\.so")),
    ("llama.cpp", re.compile(r"llama_cpp/")),
    ("numpy", re.compile(r"numpy")),
    ("cryptography, OpenSSL", re.compile(r"cryptography|lib(ssl|crypto)\.so")),
    ("Python and its standard library", re.compile(r"libpython|lib-dynload|base_library|python3\.\d+/")),
    ("C and C++ runtime, other system libraries", re.compile(r"_internal/lib[^/]*\.so")),
)

STUB = Path(__file__).with_name("binary_stub.sh")
Needed = Callable[[Path], list[str]]


def needed(path: Path) -> list[str]:
    """The names in a library's DT_NEEDED entries. Raises: CalledProcessError where it is no ELF file."""
    text = subprocess.run(["readelf", "--dynamic", "--wide", str(path)], check=True, capture_output=True, text=True,
                          env={**os.environ, "LC_ALL": "C"}).stdout
    return re.findall(r"\(NEEDED\)\s+Shared library: \[([^\]]+)\]", text)


def llama_libraries(folder: Path, ask: Needed = needed) -> tuple[list[Path], list[str]]:
    """The files of llama.cpp to take, by the names under which they are loaded, and the names that they need from
    elsewhere (without glibc and the driver).

    folder: llama_cpp/lib of an installed wheel. Raises: FileNotFoundError where a library is missing.
    """
    taken: dict[str, Path] = {}
    outside: set[str] = set()

    def take(name: str) -> None:
        if name in taken:
            return
        path = folder / name
        if not path.exists():
            raise FileNotFoundError(f"{path} is needed and not there: is this llama.cpp built with GGML_RPC=ON?")
        taken[name] = path
        for other in ask(path):
            if (folder / other).exists():
                take(other)
            elif not GLIBC.fullmatch(other) and not DRIVER.fullmatch(other):
                outside.add(other)

    take("libllama.so")
    # hydra/ggml opens these two itself.
    take("libggml-base.so.0")
    take("libggml.so.0")
    for path in sorted(folder.glob("libggml-*.so")):
        # Linked into libggml under its .so.0 name, or a plug-in that libggml opens by this one.
        if f"{path.name}.0" not in taken:
            take(path.name)
    for backend in ("cpu", "rpc"):
        if not any(name.startswith(f"libggml-{backend}") for name in taken):
            raise FileNotFoundError(f"There is no libggml-{backend} in {folder}.")
    return [taken[name] for name in sorted(taken)], sorted(outside)


def locate(names: Iterable[str], folders: Iterable[Path], ask: Needed = needed) -> list[Path]:
    """Where the loader would find these libraries and, again without glibc and driver, what they need in turn.

    folders: looked at first (CUDA's, say); then the loader's own cache. Raises: FileNotFoundError naming the missing.
    """
    cache = _loader_cache()
    found: dict[str, Path] = {}
    waiting = list(names)
    places = list(folders)
    while waiting:
        name = waiting.pop()
        if name in found or GLIBC.fullmatch(name) or DRIVER.fullmatch(name):
            continue
        path = next((place / name for place in places if (place / name).exists()), cache.get(name))
        if path is None:
            raise FileNotFoundError(f"{name} is needed by llama.cpp's libraries and cannot be found on this box.")
        found[name] = path
        waiting += ask(path)
    return [found[name] for name in sorted(found)]


def _loader_cache() -> dict[str, Path]:
    text = subprocess.run(["/sbin/ldconfig", "-p"], check=True, capture_output=True, text=True).stdout
    # Several lines of one name: the loader takes the first that is of this machine's kind.
    found: dict[str, Path] = {}
    for name, path in re.findall(r"^\s+(\S+) \(libc6,x86-64[^)]*\) => (\S+)$", text, re.M):
        found.setdefault(name, Path(path))
    return found


def glibc_floor(folder: Path) -> tuple[int, int]:
    """The newest GLIBC_x.y that any ELF file below the folder asks for."""
    newest = (2, 0)
    for path in _elf_files(folder):
        text = subprocess.run(["readelf", "--version-info", "--wide", str(path)], capture_output=True, text=True,
                              env={**os.environ, "LC_ALL": "C"}).stdout
        for major, minor in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", text):
            newest = max(newest, (int(major), int(minor)))
    return newest


def _elf_files(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    found.append(path)
    return found


def forget_build_folders(folder: Path) -> None:
    """Takes out of every library the folders of this box in which the loader would look for others.

    On the box where it runs, another user might own a folder of that name. Raises: CalledProcessError of patchelf.
    """
    patchelf = shutil.which("patchelf", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    for path in _elf_files(folder):
        places = search_path(path)
        kept = [place for place in places if place.startswith("$ORIGIN")]
        if kept != places:
            change = ["--set-rpath", ":".join(kept)] if kept else ["--remove-rpath"]
            subprocess.run([patchelf or "patchelf", *change, str(path)], check=True)


def search_path(path: Path) -> list[str]:
    """The folders in a library's DT_RPATH and DT_RUNPATH entries, as they are written there."""
    text = subprocess.run(["readelf", "--dynamic", "--wide", str(path)], check=True, capture_output=True, text=True,
                          env={**os.environ, "LC_ALL": "C"}).stdout
    found = re.findall(r"\((?:RPATH|RUNPATH)\)\s+Library (?:rpath|runpath): \[([^\]]*)\]", text)
    return [place for places in found for place in places.split(":")]


def archive(folder: Path, file: Path) -> None:
    """The folder's content as a compressed tar archive. The same content gives the same bytes: times, owners and the
    order of the directory are left out.
    """

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        entry.mode = 0o755 if entry.mode & 0o100 else 0o644
        return entry

    with file.open("wb") as out, gzip.GzipFile("", "wb", compresslevel=9, fileobj=out, mtime=0) as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
            tar.add(folder, arcname=".", filter=plain)  # in the order of their names


def pack(folder: Path, file: Path, version: str) -> None:
    """Write the one file: the script of binary_stub.sh, filled in, and the archive. It appears when it is complete.
    The folder's libraries lose the build's folders.

    Raises: ValueError where a value of the script is not filled in.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    payload = file.with_name(f".{file.name}.tar.gz")
    forget_build_folders(folder)
    archive(folder, payload)
    digest = hashlib.sha256()
    with payload.open("rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    stub = STUB.read_text(encoding="utf-8")
    unpacked = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    values = {
        "digest": digest.hexdigest()[:16], "version": version, "line": str(stub.count("\n") + 1),
        "glibc_minor": str(glibc_floor(folder)[1]), "size_mb": str(max(1, round(unpacked / 1e6))),
    }
    for name, value in values.items():
        stub = stub.replace(f"@{name}@", value)
    if left := re.search(r"@\w+@", stub):
        raise ValueError(f"{STUB.name} has a value that nothing fills in: {left[0]}")
    temporary = file.with_name(f".{file.name}.new")
    with temporary.open("wb") as out, payload.open("rb") as data:
        out.write(stub.encode())
        shutil.copyfileobj(data, out, 1 << 20)
    payload.unlink()
    temporary.chmod(0o755)
    temporary.replace(file)


def sizes(folder: Path) -> dict[str, int]:
    """Bytes by part of the program, largest first."""
    sums: dict[str, int] = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            name = str(path.relative_to(folder))
            part = next((part for part, pattern in PARTS if pattern.search(name)), "Python packages and hydra itself")
            sums[part] = sums.get(part, 0) + path.stat().st_size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def main(arguments: list[str]) -> int:
    if len(arguments) == 4 and arguments[0] == "pack":
        pack(Path(arguments[1]), Path(arguments[2]), arguments[3])
    elif len(arguments) == 2 and arguments[0] == "sizes":
        parts = sizes(Path(arguments[1]))
        for part, count in [*parts.items(), ("together", sum(parts.values()))]:
            print(f"{count / 1e6:8.1f} MB  {part}")
        print("glibc {}.{} or newer".format(*glibc_floor(Path(arguments[1]))))
    else:
        print("usage: binary_files.py pack DIRECTORY FILE VERSION | sizes DIRECTORY", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
