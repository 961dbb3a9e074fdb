"""The peer's weight cache: weights that a head has sent before are taken from this box's disk instead of the network.

What may be stored is for the client to say (``cache_flag`` on SET_TENSOR, which it sets only for model weights that
it has asked for by hash just before); a session offers nothing else here. An entry is found by the client's own
fnv1a-64 and the weight's size, and every byte of it is verified before it is first served in this process's life.
Bytes that are also in the box's own model file are stored as a reference to it.

Verifying 10 GB takes 6 to 12 s of one core. The client needs longer than that to hash them itself, so a thread
verifies ahead, in the order of the last load, while the client hashes. It begins when a head allocates room for its
weights, with what the last load used, and runs ``_AHEAD_BYTES`` before the load; not at start-up: most starts are not
followed by a load of all that is cached.

The least recently used entries go first, but never one that the load now running has used or stored: a model larger
than the cache would otherwise push out its own first half and never be served anything. A full disk turns storing off
with one warning; what is there is still served.

Trust: whoever may connect may store under any hash, as with the stock server; the allow-list is what guards a cache.
Knows nothing of sockets, sessions or devices. Files: weights_file.py; writing and eviction: weights_store.py.

Source: ggml/src/ggml-rpc/ggml-rpc.cpp (rpc_use_hash_cache, set_tensor_hash).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from hydra.peer import weights_gguf
from hydra.peer.weights_file import CorruptWeight, WeightFile, entry_name
from hydra.peer.weights_store import LOAD_PAUSE_S, Entry, Key, Store, Writer, clear, list_entries, mark_used

__all__ = ["CacheCounters", "Entry", "TensorKey", "WeightCache", "WeightFile", "Writer", "clear", "list_entries"]

_AHEAD_BYTES = 2 << 30


@dataclass(frozen=True)
class TensorKey:
    """A write as SET_TENSOR describes it: tensor name, ggml type number, shape in ggml order, byte offset in it."""

    name: str
    type: int
    ne: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class CacheCounters:
    """Since the process began."""

    hits: int
    misses: int
    hit_bytes: int
    corrupt: int
    stored: int
    referenced: int
    evicted: int
    storing: bool


class WeightCache:
    """The cache in ``directory``, holding at most ``max_bytes`` of files. One owner: ``close()`` or ``with``.
    Thread-safe.

    ``model_path``: a GGUF on this box whose tensors are referred to instead of copied. ``reserve_bytes``: disk space
    that is left to others.

    Raises: HydraError when the directory cannot be used, ModelError when ``model_path`` is no GGUF.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        model_path: Path | None = None,
        reserve_bytes: int = 256 << 20,
        logger: logging.Logger | None = None,
    ) -> None:
        self.directory = directory
        self._log = logger or logging.getLogger("hydra.peer.weights")
        self._model = weights_gguf.index(model_path.resolve()) if model_path else {}
        self._store = Store(directory, max_bytes, reserve_bytes, self._log)
        self._lock = threading.Lock()
        self._verified: dict[Key, tuple[int, bytes]] = {}
        self._key_locks: collections.defaultdict[Key, threading.Lock] = collections.defaultdict(threading.Lock)
        self._hits = self._misses = self._hit_bytes = self._corrupt = 0
        self._scout = _Scout(self)

    def close(self, timeout_s: float = 30.0) -> None:
        """Publish what has been received whole, for ``timeout_s`` at most, then end the threads."""
        self._scout.close()
        self._store.close(timeout_s)

    def __enter__(self) -> WeightCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def flush(self) -> None:
        """Wait until every weight that was committed is on disk or was refused."""
        self._store.flush()

    @property
    def counters(self) -> CacheCounters:
        store = self._store
        with self._lock:
            return CacheCounters(
                self._hits, self._misses, self._hit_bytes, self._corrupt,
                store.stored, store.referenced, store.evicted, store.storing,
            )  # fmt: skip

    def expect(self, size_bytes: int) -> None:
        """A head has made room for this many bytes of weights: what the last load used will be asked for, perhaps."""
        self._scout.expect(size_bytes)

    def lookup(self, fnv: int, size_bytes: int) -> WeightFile | None:
        """The verified entry for the client's hash, None when there is none. The caller closes it.

        ``size_bytes`` is what is left of the tensor behind the write's offset: SET_TENSOR_HASH says no size, and an
        entry that would not fit is none. The entry of just that size wins, else the only one that is smaller.
        """
        self._store.tick()
        key = self._find(fnv, size_bytes)
        if key is not None:
            self._scout.follow(key)
        weight = self._open_verified(key) if key is not None else None
        with self._lock:
            if weight is None:
                self._misses += 1
                return None
            self._hits += 1
            self._hit_bytes += weight.size_bytes
        with contextlib.suppress(OSError):
            mark_used(weight.path)
        return weight

    def begin(self, fnv: int, size_bytes: int, tensor: TensorKey | None = None) -> Writer | None:
        """A writer for a weight that the client permits to cache; None when it is not to be stored.

        Not stored are a weight larger than the whole cache, one that is being stored already, one for which only
        entries of the running load could make room, and any once storing is off.
        """
        return self._store.begin((fnv, size_bytes), self._in_model(tensor, size_bytes))

    def _find(self, fnv: int, size_bytes: int) -> Key | None:
        if (self.directory / entry_name(fnv, size_bytes)).exists():
            return fnv, size_bytes
        smaller = [e.key for e in list_entries(self.directory) if e.fnv == fnv and e.size_bytes < size_bytes]
        return smaller[0] if len(smaller) == 1 else None

    def _open_verified(self, key: Key) -> WeightFile | None:
        """The entry, opened and known to be good; a bad one is removed and counts as none."""
        path = self.directory / entry_name(*key)
        with self._lock:
            key_lock = self._key_locks[key]
        with key_lock:  # the thread ahead may be in the midst of this very entry
            weight = None
            try:
                weight = WeightFile(path)
                if self._verified.get(key) != weight.identity:
                    weight.verify()
                    self._verified[key] = weight.identity
                return weight
            except FileNotFoundError:
                return None
            except (CorruptWeight, OSError) as error:
                if weight is not None:
                    weight.close()
                self._log.warning("weight cache: removed a damaged entry: %s", error)
                with self._lock:
                    self._corrupt += 1
                with contextlib.suppress(OSError):
                    path.unlink()
                return None

    def _in_model(self, tensor: TensorKey | None, size_bytes: int) -> tuple[Path, int] | None:
        """Where the local model file has a tensor of this name, type and shape; equal bytes are seen to later."""
        place = self._model.get(tensor.name) if tensor else None
        if tensor is None or place is None or (place.type, place.ne) != (tensor.type, tensor.ne):
            return None
        offset = place.offset + tensor.offset
        try:
            return (place.path, offset) if offset + size_bytes <= place.path.stat().st_size else None
        except OSError:
            return None


class _Scout:
    """Verifies entries before they are asked for: those that followed the last hit when the model was last loaded.

    Before the first hit it takes the model that was loaded last for the one that comes. A wrong guess costs no more
    than having read what is within reach.
    """

    def __init__(self, cache: WeightCache) -> None:
        self._cache = cache
        self._changed = threading.Condition()
        self._order: list[Key] = []
        self._places: dict[Key, int] = {}
        self._from: int | None = None  # the place in the order to go on from
        self._closed = False
        self._thread: threading.Thread | None = None

    def follow(self, key: Key) -> None:
        """The load is at ``key``: go on behind it."""
        with self._changed:
            if key not in self._places:
                # Before the hit is marked as used: the order of use is that of the last load.
                self._learn(list_entries(self._cache.directory))
            place = self._places.get(key)
            self._from = place + 1 if place is not None else None
            self._wake()

    def expect(self, size_bytes: int) -> None:
        """A load of at most so much is about to begin."""
        with self._changed:
            entries = list_entries(self._cache.directory)
            self._learn(entries)
            first, room = len(entries), size_bytes
            while first and entries[first - 1].size_bytes <= room:
                if first < len(entries) and entries[first].used_ns - entries[first - 1].used_ns > LOAD_PAUSE_S * 1e9:
                    break  # an earlier load's
                first -= 1
                room -= entries[first].size_bytes
            self._from = first
            self._wake()

    def _learn(self, entries: list[Entry]) -> None:
        self._order = [entry.key for entry in entries]
        self._places = {each: place for place, each in enumerate(self._order)}

    def _wake(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="weight-scout", daemon=True)
            self._thread.start()
        self._changed.notify()

    def close(self) -> None:
        """End the thread, within the time that one entry takes."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(30.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                key = self._next()
                while key is None and not self._closed:
                    self._changed.wait()
                    key = self._next()
                if self._closed or key is None:
                    return
            weight = self._cache._open_verified(key)
            if weight is not None:
                weight.close()
            else:
                with self._changed:
                    self._places.pop(key, None)  # gone: do not come back to it

    def _next(self) -> Key | None:
        """The first unverified entry from the place on and within reach of it."""
        ahead = 0
        for key in self._order[self._from :] if self._from is not None else ():
            if ahead > _AHEAD_BYTES:
                return None
            ahead += key[1]
            if key in self._places and key not in self._cache._verified:
                return key
        return None
