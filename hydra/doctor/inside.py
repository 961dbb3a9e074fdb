"""The checks that load llama.cpp, in a process of their own: versions, registries, devices, kernels.

libggml ends its process on some faults, and a driver may hang; the doctor must outlive both and say at which check it
was. ``run`` starts `python -m hydra.doctor.inside QUESTION` and hands on its findings as they come. ``main`` is that
process: a line of JSON before each check ({"begin": …}) and one for each finding.

Knows what to ask from a Question alone, nothing of hydra.toml.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.doctor.finding import Finding, fail, ok, skip, warn
from hydra.errors import HydraError

LIMIT_S = 90.0  # a driver that has to be woken up, or compiles kernels for a new card, takes its time
_CACHE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}


@dataclass(frozen=True)
class Question:
    """What this box is meant to be. device, gpu, memory_gib: of its node; cache types and head_dim: of the model."""

    device: str = "auto"
    gpu: str = ""
    memory_gib: float = 0.0
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    head_dims: tuple[int, ...] = (128,)


def run(question: Question, limit_s: float = LIMIT_S, command: list[str] | None = None) -> Iterator[Finding]:
    """The findings of the inner process; its death or silence is one more."""
    argument = json.dumps(asdict(question))
    if command is None:
        frozen = getattr(sys, "frozen", False)
        command = [sys.executable, "_inside"] if frozen else [sys.executable, "-m", "hydra.doctor.inside"]
    process = subprocess.Popen([*command, argument], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    doing, ended, errors = "starting", False, b""
    try:
        for line in _lines(process, limit_s):
            message = json.loads(line)
            if "begin" in message:
                doing = message["begin"]
            elif "end" in message:
                ended = True
            else:
                yield Finding(**message)
        if not ended:
            late = process.poll() is None and not _ends(process, 1.0)
            process.kill()
            errors = process.stderr.read() if process.stderr is not None else b""
            code = process.wait()
            how = (f"did not come back within {limit_s:g} s" if late else
                   f"ended by signal {-code}" if code < 0 else f"exited with code {code}")
            words = _last_words(errors.decode(errors="replace"))
            yield fail("library", doing, f"llama.cpp {how} while this was checked{f': {words}' if words else ''}",
                       "Driver, card or library: see the system's log (dmesg), restart the box, reinstall the driver.")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _ends(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    try:
        process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        return False


def _lines(process: subprocess.Popen[bytes], limit_s: float) -> Iterator[str]:
    """Lines of its stdout until it closes or the time is up."""
    assert process.stdout is not None  # it was asked for
    deadline = time.monotonic() + limit_s
    fd, data = process.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                return
            piece = os.read(fd, 65536)
            if not piece:
                return
            *whole, data = (data + piece).split(b"\n")
            for line in whole:
                yield line.decode()


def _last_words(text: str) -> str:
    telling = [line.strip() for line in text.splitlines() if re.search(r"error|assert|abort|fail", line, re.I)]
    return (telling or [line.strip() for line in text.splitlines() if line.strip()] or [""])[-1][:200]


# ---- the inner process ---------------------------------------------------------------------------------------------


def clashing_packages() -> list[str]:
    """Installed distributions that bring a module named hydra as well (hydra-core, most likely)."""
    found = []
    for name in ("hydra-core",):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_clash(clashes: Iterable[str], ours: Path) -> Iterator[Finding]:
    names = ", ".join(clashes)
    if names:
        yield fail("library", "module name", f"{names} is installed here and also brings a module named hydra; "
                   f"the one in use is {ours}",
                   "Give hydra-llm a virtual environment of its own (bash build/demo.sh makes one).")
    else:
        yield ok("library", "module name", f"hydra is {ours}, and no other package brings that name")


def registries(files: Iterable[str]) -> dict[str, list[str]]:
    """Loaded libraries by what they are (libggml-base …), where more than one file of one kind is loaded."""
    kinds: dict[str, list[str]] = {}
    for path in files:
        kind = Path(path).name.split(".so")[0]
        kinds.setdefault(kind, []).append(path)
    return {kind: paths for kind, paths in kinds.items() if len(paths) > 1}


def check_registries(files: list[str]) -> Finding:
    twice = registries(files)
    folders = sorted({str(Path(path).parent) for path in files})
    names = ", ".join(Path(path).name for path in files)
    if twice:
        kind, paths = next(iter(twice.items()))
        return fail("library", "one registry", f"{kind} is loaded {len(paths)} times: {', '.join(paths)}",
                    "Two copies have two device registries. Unset LLAMA_CPP_LIB_PATH and LD_PRELOAD, and keep one "
                    "llama-cpp-python.", files=files)
    return ok("library", "one registry", f"{names} from {', '.join(folders)}", files=files)


def check_library() -> Iterator[Finding]:
    """Version, RPC, registries and layouts. The rest is skipped where the library cannot be loaded at all."""
    from hydra.ggml import abi, library

    package = library.package_version() or "of unknown version"
    ggml = library.load()
    yield ok("library", "version", f"llama-cpp-python {package}, ggml {ggml.version()} "
             f"({ggml.base.ggml_commit().decode()[:9]}), {library.PINNED_OP_COUNT} ops: as pinned")
    has_rpc = bool(ggml.registry.ggml_backend_reg_by_name(b"RPC"))
    from hydra.head import llama

    if not has_rpc:
        yield fail("library", "RPC", "this llama-cpp-python was built without GGML_RPC",
                   "Rebuild it with CMAKE_ARGS=-DGGML_RPC=ON (bash build/demo.sh does it).")
    else:
        llama.api()
        yield ok("library", "RPC", "built in")
        yield check_registries(library.loaded_files())
    problem = abi.verify_layout(ggml)
    if problem:
        yield warn("library", "private layout", f"ggml_cgraph is not laid out as hydra expects: {problem}",
                   "Graphs are then built through the public interface: right, but slower. Install the pinned release.")
    else:
        yield ok("library", "private layout", "ggml_tensor and ggml_cgraph are laid out as hydra expects")


def check_devices(question: Question) -> Iterator[Finding]:
    """What ggml sees, against what the node says it has."""
    from hydra.doctor import kernels
    from hydra.ggml import library
    from hydra.ggml.backend import devices, memory, pick_device

    ggml = library.load()
    found = [device for device in devices(ggml) if device.registry != "RPC"]
    for device in found:
        free, total = memory(ggml, device)
        yield ok("gpu" if device.kind != "cpu" else "system", f"device {device.name}",
                 f"{device.description}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free", name=device.name,
                 kind=device.kind, free_bytes=free, total_bytes=total, features=kernels.features(ggml, device))
    gpus = [device for device in found if device.kind in ("gpu", "igpu")]
    wants_gpu = question.gpu or question.device.upper().startswith(("CUDA", "ROCM", "VULKAN", "METAL", "SYCL"))
    if not gpus:
        nvidia = Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia").exists()
        cuda = (library.library_dir() / "libggml-cuda.so").exists()
        seen = "ggml sees no GPU: " + ("the library was built without GGML_CUDA" if not cuda else
                                       "built with CUDA, but no device came up")
        if wants_gpu or nvidia:
            fix = ("Rebuild llama-cpp-python with CUDA: bash build/demo.sh where nvcc and the card are there."
                   if not cuda else "Check the driver (nvidia-smi), its version, and CUDA_VISIBLE_DEVICES.")
            yield (fail if wants_gpu else warn)("gpu", "GPU", seen, fix)
        else:
            yield skip("gpu", "GPU", f"{seen}, and none is asked for")
    try:
        device = pick_device(ggml, question.device)
    except HydraError as exc:
        yield fail("gpu", f"device {question.device}", exc.message, exc.hint)
        return
    yield from _against_the_file(question, device.name, device.description, memory(ggml, device)[1])
    yield from check_kernels(ggml, device, question)


def _against_the_file(question: Question, name: str, description: str, total: int) -> Iterator[Finding]:
    if question.gpu:
        if _plain(question.gpu) in _plain(description):
            yield ok("gpu", "card", f"{name} is {description}, as hydra.toml says")
        else:
            yield warn("gpu", "card", f"{name} is {description}; hydra.toml says {question.gpu}",
                       "Correct the node's gpu or its device: with several cards the numbering may differ.")
    if question.memory_gib and question.memory_gib * 2**30 > total * 1.02:
        yield warn("gpu", "memory", f"{name} has {total / 2**30:.1f} GiB; hydra.toml says {question.memory_gib:g}",
                   "Lower the node's memory_gib, or leave it out.")


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def check_kernels(ggml: Any, device: Any, question: Question) -> Iterator[Finding]:
    """A product on the device against the CPU, and flash attention for the cache types of hydra.toml."""
    from hydra.doctor import kernels

    say({"begin": f"product on {device.name}"})
    try:
        began = time.perf_counter()
        wrong = kernels.check_product(ggml, device)
    except HydraError as exc:
        yield fail("compute", f"product on {device.name}", exc.message, exc.hint or "See its driver and its log.")
    else:
        count = 4 * 256 * 256
        took = (time.perf_counter() - began) * 1e3
        if wrong:
            yield fail("compute", f"product on {device.name}", f"{wrong} of {count} numbers differ from the CPU's",
                       "The card, its slot, riser or memory is sick: lower its clocks, reseat it, try another slot.",
                       wrong=wrong)
        else:
            yield ok("compute", f"product on {device.name}", f"{count} numbers equal to the CPU's ({took:.0f} ms)")
    if question.flash_attn == "off":
        return
    for head_dim in question.head_dims:
        types = f"K {question.type_k}, V {question.type_v}, heads of {head_dim}"
        if kernels.flash_attention_supported(ggml, device, _CACHE_TYPES[question.type_k], _CACHE_TYPES[question.type_v],
                                             head_dim):
            yield ok("library", "flash attention", f"{device.name} has it for {types}")
        else:
            yield fail("library", "flash attention", f"{device.name}'s build lacks it for {types}",
                       "Use one type for both caches (q8_0 or f16), or build with GGML_CUDA_FA_ALL_QUANTS=ON.")


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """The inner process. Returns its exit code."""
    fields = json.loads(arguments[0])
    question = Question(**{**fields, "head_dims": tuple(fields["head_dims"])})
    import hydra

    steps: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("module name", lambda: check_clash(clashing_packages(), Path(hydra.__file__).parent)),
        ("llama.cpp", check_library),
        ("devices", lambda: check_devices(question)),
    ]
    for name, step in steps:
        say({"begin": name})
        try:
            for finding in step():
                say(finding.to_dict())
        except HydraError as exc:
            say(fail("library", name, exc.message, exc.hint).to_dict())
            break
    say({"end": True})
    sys.stdout.flush()
    os._exit(0)  # exit handlers of a sick driver may hang


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
