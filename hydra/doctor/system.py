"""This box apart from its card: memory, swap, limits, disk for the weight cache, CPU clocks.

Reads /proc and /sys (from a root that tests can give) and asks psutil; changes nothing.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from hydra.doctor.finding import Finding, ok, skip, warn

GIB = 1 << 30
LOW_MEMORY_BYTES = 1 * GIB
_UNLIMITED = resource.RLIM_INFINITY


def check(cache_dir: str = "", needed_bytes: int = 0, root: Path = Path("/")) -> Iterator[Finding]:
    """cache_dir: of a peer, empty = none. needed_bytes: weights that this node will hold, 0 = not known."""
    yield from memory()
    yield from limits()
    if cache_dir:
        yield disk(Path(cache_dir), needed_bytes)
    yield from processor(root)


def memory() -> Iterator[Finding]:
    import psutil

    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    yield judge_memory(ram.total, ram.available, swap.total, swap.used)


def judge_memory(total: int, available: int, swap_total: int, swap_used: int) -> Finding:
    words = (f"{available / GIB:.1f} of {total / GIB:.1f} GiB free, "
             f"{swap_used / GIB:.1f} of {swap_total / GIB:.1f} GiB swapped")
    data = {"total_bytes": total, "available_bytes": available, "swap_bytes": swap_used}
    if available < max(LOW_MEMORY_BYTES, total // 20):
        return warn("system", "memory", words, "End other programs: the loader needs room for a piece of the file, and "
                    "what the kernel swaps out stalls whole steps.", **data)
    if swap_used > max(GIB, total // 8):
        return warn("system", "memory", words, "Much is swapped out: end other programs, or swapoff -a && swapon -a "
                    "when there is room again.", **data)
    return ok("system", "memory", words, **data)


def limits() -> Iterator[Finding]:
    """File descriptors and locked memory of this user."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield judge_files(soft)
    yield judge_locked(locked)


def judge_files(soft: int) -> Finding:
    words = f"{'no limit on' if soft == _UNLIMITED else soft} open files"
    if soft != _UNLIMITED and soft < 256:
        return warn("system", "file descriptors", words, "ulimit -n 4096, or LimitNOFILE=4096 in the service.",
                    soft=soft)
    return ok("system", "file descriptors", words, soft=soft)


def judge_locked(soft: int) -> Finding:
    words = "no limit" if soft == _UNLIMITED else f"{soft / (1 << 20):.2f} MiB"
    if soft != _UNLIMITED and soft < 64 << 10:
        return warn("system", "locked memory", words, "ulimit -l unlimited, or LimitMEMLOCK=infinity in the service: "
                    "pinned transfer buffers may be refused.", soft=soft)
    return ok("system", "locked memory", words, soft=soft)


def disk(folder: Path, needed_bytes: int) -> Finding:
    """Room for received weights where the cache lies (or would lie)."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    have = sum(item.stat().st_size for item in folder.rglob("*") if item.is_file()) if folder.is_dir() else 0
    words = f"{folder}: {have / 1e9:.1f} GB kept, {free / 1e9:.1f} GB free"
    data = {"free_bytes": free, "kept_bytes": have, "needed_bytes": needed_bytes}
    if not os.access(place, os.W_OK):
        return warn("system", "weight cache", f"{place} cannot be written by this user", "Correct peer.cache_dir or "
                    "its owner: without the cache every load crosses the network.", **data)
    if needed_bytes > free + have:
        return warn("system", "weight cache", f"{words}; this node's weights take {needed_bytes / 1e9:.1f} GB",
                    "Make room, or set peer.cache_dir to another disk.", **data)
    return ok("system", "weight cache", words, **data)


def processor(root: Path = Path("/")) -> Iterator[Finding]:
    """Governor of the CPU's clock, and how busy the box is."""
    cpus = root / "sys/devices/system/cpu"
    governors, drivers = set(), set()
    for path in sorted(cpus.glob("cpu[0-9]*/cpufreq")):
        governors.add(_read(path / "scaling_governor"))
        drivers.add(_read(path / "scaling_driver"))
    governors.discard("")
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0] if root == Path("/") else float(_read(root / "proc/loadavg").split(" ")[0] or 0)
    if load > 1.5 * cores + 1:
        yield warn("system", "processor", f"load {load:.1f} on {cores} cores", "Other programs compete for the CPU: a "
                   "step waits for its turn.", load=load, cores=cores)
    else:
        yield ok("system", "processor", f"load {load:.1f} on {cores} cores", load=load, cores=cores)
    if not governors:
        yield skip("system", "CPU governor", "this system tells none (a virtual machine, mostly)")
        return
    words = f"{', '.join(sorted(governors))} ({', '.join(sorted(drivers - {''})) or 'unknown driver'})"
    # With these two drivers powersave only means that the hardware chooses.
    managed = drivers <= {"intel_pstate", "amd-pstate-epp", ""}
    if governors & {"powersave", "conservative"} and not managed:
        yield warn("system", "CPU governor", words, "Each step waits for the clock to rise: cpupower frequency-set -g "
                   "performance (or schedutil).")
    else:
        yield ok("system", "CPU governor", words)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
