"""The weight cache: nothing but whole, verified weights is ever served, whatever happens to the disk or the process."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hydra.errors import HydraError
from hydra.peer import weights_file
from hydra.peer.weights import TensorKey, WeightCache, clear, list_entries
from hydra.peer.weights_file import PIECE_BYTES, entry_name

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent


def data_of(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def open_cache(directory: Path, max_bytes: int = 1 << 30, **options: object) -> WeightCache:
    return WeightCache(directory, max_bytes, reserve_bytes=0, **options)  # type: ignore[arg-type]


def store(cache: WeightCache, fnv: int, data: bytes, tensor: TensorKey | None = None, piece: int = 1 << 20) -> bool:
    writer = cache.begin(fnv, len(data), tensor)
    if writer is None:
        return False
    for begin in range(0, len(data), piece):
        writer.write(memoryview(data)[begin : begin + piece])
    writer.commit()
    cache.flush()
    return True


def fetch(cache: WeightCache, fnv: int, size: int) -> bytes | None:
    weight = cache.lookup(fnv, size)
    if weight is None:
        return None
    with weight:
        return b"".join(bytes(piece) for piece in weight.pieces())


def an_hour_ago(directory: Path) -> None:
    """Makes the entries older than the load that a fresh cache begins, one second apart in their present order."""
    for place, entry in enumerate(list_entries(directory)):
        stamp = time.time_ns() - 3600 * 10**9 + place * 10**9
        os.utime(entry.path, ns=(stamp, stamp))


@pytest.mark.parametrize("size", [1, 4096, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 7])
def test_what_is_stored_comes_back(tmp_path: Path, size: int) -> None:
    data = data_of(size)
    with open_cache(tmp_path) as cache:
        assert fetch(cache, 7, size) is None
        assert store(cache, 7, data)
        assert fetch(cache, 7, size) == data
        assert cache.counters.hits == 1 and cache.counters.misses == 1 and cache.counters.stored == 1
    with open_cache(tmp_path) as again:
        assert fetch(again, 7, size) == data
    assert [p.name for p in tmp_path.iterdir() if p.name != "lock"] == [entry_name(7, size)]


def test_an_entry_that_does_not_fit_the_tensor_is_none(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        store(cache, 7, data_of(5000))
        assert fetch(cache, 7, 4999) is None
        assert fetch(cache, 7, 6000) == data_of(5000)  # the head wrote part of a tensor
        store(cache, 7, data_of(5500, seed=1))
        assert fetch(cache, 7, 6000) is None  # two could be meant
        assert fetch(cache, 7, 5500) == data_of(5500, seed=1)
        assert fetch(cache, 8, 5000) is None


@pytest.mark.parametrize("left", [0, 10, 75, 76, 5000, -1])
def test_a_truncated_file_is_not_served_and_goes(tmp_path: Path, left: int, caplog: pytest.LogCaptureFixture) -> None:
    with open_cache(tmp_path) as cache:
        store(cache, 7, data_of(9000))
    path = tmp_path / entry_name(7, 9000)
    os.truncate(path, left if left >= 0 else path.stat().st_size - 1)
    with open_cache(tmp_path) as cache, caplog.at_level(logging.WARNING):
        assert fetch(cache, 7, 9000) is None
        assert cache.counters.corrupt == 1
    assert not path.exists() and "damaged" in caplog.text


@pytest.mark.parametrize(("writes", "reads"), [(1, 2), (2, 1)])
def test_a_processor_with_other_instructions_reads_the_entry_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int, reads: int
) -> None:
    monkeypatch.setattr(weights_file, "algorithm", lambda: writes)
    with open_cache(tmp_path) as cache:
        store(cache, 7, data_of(9000))
    monkeypatch.setattr(weights_file, "algorithm", lambda: reads)
    with open_cache(tmp_path) as cache:
        assert fetch(cache, 7, 9000) == data_of(9000)


@pytest.mark.parametrize("where", [0, PIECE_BYTES - 1, PIECE_BYTES + 5, 2 * PIECE_BYTES + 3, -100, -60, -40, -1])
def test_a_changed_byte_is_found(tmp_path: Path, where: int) -> None:
    size = 2 * PIECE_BYTES
    with open_cache(tmp_path) as cache:
        store(cache, 7, data_of(size))
    path = tmp_path / entry_name(7, size)
    with open(path, "r+b") as file:
        file.seek(where, os.SEEK_SET if where >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with open_cache(tmp_path) as cache:
        assert fetch(cache, 7, size) is None
    assert not path.exists()


def test_an_entry_under_another_name_is_not_served(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        store(cache, 7, data_of(9000))
        os.rename(tmp_path / entry_name(7, 9000), tmp_path / entry_name(8, 9000))
        assert fetch(cache, 8, 9000) is None


def test_a_file_of_another_kind_is_not_taken_for_an_entry(tmp_path: Path) -> None:
    (tmp_path / entry_name(7, 9000)).write_bytes(data_of(9000))
    (tmp_path / "notes.txt").write_text("mine")
    with open_cache(tmp_path) as cache:
        assert fetch(cache, 7, 9000) is None
    assert (tmp_path / "notes.txt").exists()


def test_verified_once_in_a_process_and_again_when_stored_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_cache(tmp_path) as cache:
        store(cache, 7, data_of(9000))
    count = 0
    real = weights_file.WeightFile.verify

    def counted(self: weights_file.WeightFile) -> None:
        nonlocal count
        count += 1
        real(self)

    monkeypatch.setattr(weights_file.WeightFile, "verify", counted)
    with open_cache(tmp_path) as cache:
        for _ in range(3):
            assert fetch(cache, 7, 9000) == data_of(9000)
        assert count == 1
        (tmp_path / entry_name(7, 9000)).unlink()
        store(cache, 7, data_of(9000, seed=2))
        assert fetch(cache, 7, 9000) == data_of(9000, seed=2)
        assert count == 2


def test_entries_that_follow_are_verified_ahead(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        for fnv in range(6):
            store(cache, fnv, data_of(9000, seed=fnv))
    an_hour_ago(tmp_path)
    with open_cache(tmp_path) as cache:
        assert fetch(cache, 2, 9000) is not None
        deadline = time.monotonic() + 20
        while len(cache._verified) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sorted(cache._verified) == [(fnv, 9000) for fnv in (2, 3, 4, 5)]


def test_what_the_last_load_used_is_verified_before_the_first_question(tmp_path: Path) -> None:
    """As much of it as there is room for, and nothing of the load before it."""
    with open_cache(tmp_path) as cache:
        for fnv in range(6):
            store(cache, fnv, data_of(9000, seed=fnv))
    for fnv in range(2):
        stamp = time.time_ns() - 3600 * 10**9
        os.utime(tmp_path / entry_name(fnv, 9000), ns=(stamp, stamp))
    for room, wanted in ((100_000, (2, 3, 4, 5)), (20_000, (4, 5)), (100, ())):
        with open_cache(tmp_path) as cache:
            cache.expect(room)
            deadline = time.monotonic() + 20
            while len(cache._verified) < len(wanted) and time.monotonic() < deadline:
                time.sleep(0.01)
            cache.close()  # nothing more comes after it
            assert sorted(cache._verified) == [(fnv, 9000) for fnv in wanted]


def test_a_damaged_entry_ahead_does_not_stop_the_rest(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        for fnv in range(3):
            store(cache, fnv, data_of(9000, seed=fnv))
    an_hour_ago(tmp_path)
    damaged = tmp_path / entry_name(1, 9000)
    stamp = damaged.stat().st_mtime_ns
    os.truncate(damaged, 100)
    os.utime(damaged, ns=(stamp, stamp))
    with open_cache(tmp_path) as cache:
        assert fetch(cache, 0, 9000) is not None
        deadline = time.monotonic() + 20
        while (2, 9000) not in cache._verified and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (2, 9000) in cache._verified and not damaged.exists()


def test_a_short_or_overlong_or_aborted_weight_leaves_nothing(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        for sizes in ([4000], [4000, 2000]):
            writer = cache.begin(7, 5000)
            assert writer is not None
            for size in sizes:
                writer.write(memoryview(data_of(size)))
            writer.commit()
        writer = cache.begin(7, 5000)
        assert writer is not None
        writer.write(memoryview(data_of(5000)))
        writer.abort()
        writer.commit()
        cache.flush()
        assert fetch(cache, 7, 5000) is None
        assert [p.name for p in tmp_path.iterdir()] == ["lock"]
        assert store(cache, 7, data_of(5000))  # the key is free again


def test_a_weight_is_stored_by_one_writer_at_a_time(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        first = cache.begin(7, 5000)
        assert first is not None and cache.begin(7, 5000) is None
        first.abort()
        second = cache.begin(7, 5000)
        assert second is not None
        second.abort()


def test_a_full_disk_turns_storing_off_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.write
    left = 0

    def write(descriptor: int, data: memoryview) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(descriptor, data[:left])
        left -= count
        return count

    with open_cache(tmp_path) as cache, caplog.at_level(logging.WARNING):
        store(cache, 1, data_of(9000))
        monkeypatch.setattr(os, "write", write)
        left = 100_000
        store(cache, 2, data_of(200_000), piece=30_000)
        for fnv in range(3, 6):
            assert not store(cache, fnv, data_of(9000))
        assert fetch(cache, 2, 200_000) is None
        assert fetch(cache, 1, 9000) == data_of(9000)
        assert not cache.counters.storing
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([entry_name(1, 9000), "lock"])
    assert caplog.text.count("nothing more is stored") == 1


def test_a_disk_that_fills_while_the_checksums_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with open_cache(tmp_path) as cache, caplog.at_level(logging.WARNING):
        store(cache, 2, data_of(20_000))
        assert fetch(cache, 2, 20_000) is None and not cache.counters.storing
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]
    assert caplog.text.count("nothing more is stored") == 1


def test_a_limit_on_file_size_is_like_a_full_disk(tmp_path: Path) -> None:
    """With the kernel's own refusal instead of a pretended one."""
    code = f"""
import resource, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from hydra.peer.weights import WeightCache
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with WeightCache(Path({str(tmp_path)!r}), 1 << 30, reserve_bytes=0) as cache:
    for fnv, size in ((1, 50_000), (2, 150_000), (3, 50_000)):
        writer = cache.begin(fnv, size)
        if writer is not None:
            writer.write(memoryview(bytes(size)))
            writer.commit()
    cache.flush()
    print(cache.counters.stored, cache.counters.storing)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["1", "False"], result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([entry_name(1, 50_000), "lock"])


def test_some_of_the_disk_is_left_to_others(tmp_path: Path) -> None:
    with WeightCache(tmp_path, 1 << 60, reserve_bytes=1 << 60) as cache:
        assert not store(cache, 1, data_of(9000)) and not cache.counters.storing


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        for fnv in range(4):
            store(cache, fnv, data_of(100_000))
    an_hour_ago(tmp_path)
    os.utime(tmp_path / entry_name(0, 100_000), ns=(time.time_ns() - 10**10,) * 2)
    with open_cache(tmp_path, 450_000) as cache:
        assert store(cache, 9, data_of(100_000))
        assert cache.counters.evicted == 1
    assert sorted(e.fnv for e in list_entries(tmp_path)) == [0, 2, 3, 9]


def test_a_load_does_not_evict_what_it_uses_itself(tmp_path: Path) -> None:
    with open_cache(tmp_path, 450_000) as cache:
        kept = [fnv for fnv in range(8) if store(cache, fnv, data_of(100_000))]
        assert kept == [0, 1, 2, 3]
        assert cache.counters.storing  # full is not broken
    an_hour_ago(tmp_path)
    with open_cache(tmp_path, 450_000) as cache:  # the same model again: its first half is served, again and again
        served = [fnv for fnv in range(8) if fetch(cache, fnv, 100_000) or store(cache, fnv, data_of(100_000))]
        assert served == [0, 1, 2, 3]
    an_hour_ago(tmp_path)
    with open_cache(tmp_path, 450_000) as cache:  # another model takes its place
        for fnv in range(20, 24):
            assert store(cache, fnv, data_of(100_000))
    assert sorted(e.fnv for e in list_entries(tmp_path)) == [20, 21, 22, 23]


def test_a_weight_larger_than_the_cache_is_not_stored(tmp_path: Path) -> None:
    with open_cache(tmp_path, 450_000) as cache:
        store(cache, 1, data_of(100_000))
        assert not store(cache, 2, data_of(450_000))
        assert fetch(cache, 1, 100_000) is not None


def test_processes_that_share_a_directory(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from hydra.peer import weights_store
from hydra.peer.weights import WeightCache
weights_store.LOAD_PAUSE_S = 0.0  # every store is a load of its own: eviction all the time
me = int(sys.argv[1])
with WeightCache(Path({str(tmp_path)!r}), 700_000, reserve_bytes=0) as cache:
    for i in range(40):
        fnv = (me * 1000 + i) if i % 2 else i
        data = bytes([fnv % 251]) * 50_000
        writer = cache.begin(fnv, len(data))
        if writer is not None:
            writer.write(memoryview(data))
            writer.commit()
        weight = cache.lookup(i - i % 2, 50_000)
        if weight is not None:
            with weight:
                got = b"".join(bytes(p) for p in weight.pieces())
            assert got == bytes([weight.fnv % 251]) * 50_000
    cache.flush()
    assert cache.counters.storing and not cache.counters.corrupt, cache.counters
    print(cache.counters.stored, cache.counters.evicted)
"""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(3)
    ]
    outputs = [child.communicate(timeout=90) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], outputs
    assert sum(int(out.split()[1]) for out, _ in outputs) > 10
    entries = list_entries(tmp_path)
    assert sum(e.stored_bytes for e in entries) <= 700_000 and len(entries) > 5
    with open_cache(tmp_path) as cache:
        assert all(fetch(cache, e.fnv, e.size_bytes) == bytes([e.fnv % 251]) * 50_000 for e in entries)
    assert not list(tmp_path.glob("incoming-*"))


def test_an_entry_removed_while_it_is_read_stays_readable(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        store(cache, 7, data_of(9000))
        weight = cache.lookup(7, 9000)
        assert weight is not None
        clear(tmp_path)
        with weight:
            assert b"".join(bytes(p) for p in weight.pieces()) == data_of(9000)


def test_what_a_crashed_writer_left_goes_and_what_is_being_written_stays(tmp_path: Path) -> None:
    (tmp_path / "incoming-1-0").write_bytes(b"half a weight")
    living = tmp_path / "incoming-1-1"
    living.write_bytes(b"half a weight")
    with open(living, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        open_cache(tmp_path).close()
        assert [p.name for p in tmp_path.glob("incoming-*")] == ["incoming-1-1"]


def test_serving_a_weight_does_not_grow_the_process(tmp_path: Path) -> None:
    size = 160 * MIB
    with open_cache(tmp_path) as cache:
        writer = cache.begin(7, size)
        assert writer is not None
        block = memoryview(bytes(MIB))
        for _ in range(size // MIB):
            writer.write(block)
        writer.commit()
        cache.flush()
        before = peak = resident()
        weight = cache.lookup(7, size)
        assert weight is not None
        with weight:
            for piece in weight.pieces():
                assert np.frombuffer(piece, np.uint8).max() == 0
                peak = max(peak, resident())
        assert peak - before < 48 * MIB, f"{(peak - before) / MIB:.0f} MiB"


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_list_and_clear(tmp_path: Path) -> None:
    assert list_entries(tmp_path / "none") == [] and clear(tmp_path / "none") == (0, 0)
    with open_cache(tmp_path) as cache:
        store(cache, 1, data_of(9000))
        store(cache, 2, data_of(8000))
    assert [(e.fnv, e.size_bytes) for e in list_entries(tmp_path)] == [(1, 9000), (2, 8000)]
    (tmp_path / "notes.txt").write_text("mine")
    count, freed = clear(tmp_path)
    assert count == 2 and freed > 17_000
    assert list_entries(tmp_path) == [] and (tmp_path / "notes.txt").exists()


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HydraError, match=r"peer\.cache_dir"):
        open_cache(tmp_path / "file" / "cache")


def test_closing_publishes_what_was_committed(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        for fnv in range(5):
            writer = cache.begin(fnv, 9000)
            assert writer is not None
            writer.write(memoryview(data_of(9000)))
            writer.commit()
        late = cache.begin(9, 10)
        assert late is not None
    assert len(list_entries(tmp_path)) == 5
    late.write(memoryview(bytes(10)))
    late.commit()  # too late: forgotten, not waited for
    assert not list(tmp_path.glob("incoming-*")) and cache.begin(10, 10) is None
