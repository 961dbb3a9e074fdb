"""Model files from Hugging Face: what a reference means, which files it stands for, and fetching them for good.

Addresses, tokens, replies and errors are huggingface_hub's. The transfer is our own, because `hf_hub_download` throws
away what it has when it ends early, and 20 GB over a home line have to go on the next day: a file grows as
`NAME.SUM.part` beside its place, is continued by range, and gets its name only when its checksum is right.

Knows nothing of hydra.toml, and draws nothing. huggingface_hub is imported when something is asked.

Source: common/download.cpp of the pinned llama.cpp (what `owner/repo:QUANT` stands for); the Hub's API
(huggingface_hub's hf_api.py and utils/_http.py).
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from .errors import ConfigError, ModelError

HOME = "https://huggingface.co"
FIRST_QUANTS = ("Q4_K_M", "Q8_0")  # of a repository without a quant: as llama.cpp's -hf, then its first file
ASK_S = 30.0
SILENCE_S = 15.0  # a transfer that says nothing for so long has broken
CHUNK_BYTES = 1 << 20
TRIES = 7  # in a row without a new byte, with waits of 1, 2, 4 … 16 s between
RETRIED = (408, 429, 500, 502, 503, 504)
_NOT_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_REPO = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Reference:
    """One model in one repository: by `file`, or by `quant` (empty = FIRST_QUANTS). revision empty = main."""

    repo: str
    file: str = ""
    quant: str = ""
    revision: str = ""


@dataclass(frozen=True)
class RemoteFile:
    """path: within the repository; sha256: empty for a file small enough to be in git, which git_sha1 then checks."""

    path: str
    size_bytes: int
    sha256: str = ""
    git_sha1: str = ""

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


@dataclass(frozen=True)
class Listing:
    """What a repository has at one commit, in the order of its names."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def models(self) -> tuple[RemoteFile, ...]:
        """GGUF files that hold a model, or the first part of one."""
        return tuple(file for file in self.files if _is_model(file.path))


def parse(text: str, revision: str = "") -> Reference:
    """`owner/repo/file.gguf`, `owner/repo:QUANT`, `owner/repo`, or the address of one of these in a browser.

    Raises: ConfigError for anything else.
    """
    rest = re.sub(r"^(https?://)?(www\.)?(huggingface\.co|hf\.co)/", "", text.strip(), flags=re.IGNORECASE)
    rest = rest.partition("?")[0].strip("/")
    owner, _, more = rest.partition("/")
    name, _, path = more.partition("/")
    name, _, quant = name.partition(":")
    if web := re.fullmatch(r"(?:blob|resolve|tree)/([^/]+)/?(.*)", path):
        revision, path = revision or web[1], web[2]
    repo = f"{owner}/{name}"
    if not _REPO.fullmatch(repo) or "://" in rest or (path and (quant or not path.lower().endswith(".gguf"))):
        raise ConfigError(f"{text!r} is not a model of Hugging Face.",
                          "Write owner/repository/file.gguf, or owner/repository:QUANT such as :Q5_K_M.")
    return Reference(repo, path, quant, "" if revision == "main" else revision)


def choose(listing: Listing, wanted: Reference) -> list[RemoteFile]:
    """The files of the model that is meant: one, or all parts of a split one, in order.

    Raises: ModelError with the nearest names where there is none, or where a part is missing.
    """
    chosen = _by_name(listing, wanted.file) if wanted.file else _by_quant(listing, wanted.quant)
    part = _PART.fullmatch(chosen.path)
    if not part:
        return [chosen]
    count = int(part[3])
    names = [f"{part[1]}-{index:05d}-of-{part[3]}.gguf" for index in range(1, count + 1)]
    there = {file.path: file for file in listing.files}
    missing = [name for name in names if name not in there]
    if missing:
        raise ModelError(f"{listing.repo} lacks {len(missing)} of the {count} parts of this model, such as "
                         f"{missing[0]}.", "Take another file of the repository, or another repository.")
    return [there[name] for name in names]


def _by_name(listing: Listing, path: str) -> RemoteFile:
    for file in listing.files:
        if file.path == path:
            return file
    # Names are often typed without the folder that they are in.
    same = [file for file in listing.files if file.name.lower() == PurePosixPath(path).name.lower()]
    if len(same) == 1:
        return same[0]
    names = [file.path for file in listing.models]
    close = difflib.get_close_matches(path, names, 3, 0.4)
    raise ModelError(f"{listing.repo} has no file {path}.",
                     f"Did you mean {' or '.join(close)}?" if close else _what_there_is(listing))


def _by_quant(listing: Listing, quant: str) -> RemoteFile:
    for tag in (quant,) if quant else FIRST_QUANTS:
        pattern = re.compile(rf"(^|[/._-]){re.escape(tag)}[.-]", re.IGNORECASE)
        for file in listing.models:
            if pattern.search(file.path):
                return file
    if not quant and listing.models:
        return listing.models[0]
    if not listing.models:
        raise ModelError(f"{listing.repo} has no GGUF file with a model in it.", _what_there_is(listing))
    raise ModelError(f"{listing.repo} has nothing with the quant {quant}.", _what_there_is(listing))


def _is_model(path: str) -> bool:
    name = PurePosixPath(path).name.lower()
    part = _PART.fullmatch(name)
    return (name.endswith(".gguf") and not any(word in name for word in _NOT_MODELS)
            and (part is None or int(part[2]) == 1))


def _what_there_is(listing: Listing) -> str:
    names = [file.path for file in listing.models]
    if not names:
        return "Its author may have a second repository with -GGUF at the end of its name."
    return f"It has: {', '.join(names[:12])}{f' and {len(names) - 12} more' if len(names) > 12 else ''}."


class Hub:
    """The server: HF_ENDPOINT or huggingface.co, with the token of HF_TOKEN or `hf auth login`."""

    def __init__(self, endpoint: str = "") -> None:
        from huggingface_hub.hf_api import HfApi  # by module: what the package itself offers, a frozen program lacks
        from huggingface_hub.utils import logging as hub_logging

        hub_logging.set_verbosity(logging.ERROR)  # what it warns of is told here as an error or a retry
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request else, where logs are shown
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or HOME).rstrip("/")
        self.api = HfApi(endpoint=self.endpoint, library_name="hydra")

    def listing(self, wanted: Reference) -> Listing:
        """What the repository has. Raises: ModelError in words for each way in which that can fail."""
        with self._translated(wanted.repo, suggest=True):
            info = self.api.model_info(wanted.repo, revision=wanted.revision or None, files_metadata=True,
                                       timeout=ASK_S)
        files = []
        for each in info.siblings or ():
            sha256 = str(each.lfs.sha256) if each.lfs else ""
            files.append(RemoteFile(each.rfilename, int((each.lfs.size if each.lfs else each.size) or 0), sha256,
                                    "" if sha256 else str(each.blob_id or "")))
        return Listing(wanted.repo, str(info.sha), tuple(sorted(files, key=lambda file: file.path)))

    def near(self, repo: str) -> list[str]:
        """Repositories with a like name that have GGUF files; none where the server does not say."""
        import httpx2

        owner, _, name = repo.partition("/")
        found: list[str] = []
        # Either half may be the wrong one; the server's own search forgives no letter.
        for words in ({"author": owner}, {"search": re.split(r"[-_.]", name)[0]}, {"search": name}):
            try:
                found += [model.id for model in self.api.list_models(filter="gguf", limit=100, **words)]
            except (OSError, httpx2.HTTPError):
                continue
        return difflib.get_close_matches(repo, dict.fromkeys(found), 3, 0.6)

    @contextmanager
    def stream(self, listing: Listing, file: RemoteFile, begin: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """The file's bytes from `begin` on, if the server can: where they really begin, and the bytes.

        Raises: ModelError for what no second try mends, ConnectionError for what one may.
        """
        import httpx2
        from huggingface_hub.file_download import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        # Asked anew each time: the address that it leads to carries a signature that runs out.
        url = hf_hub_url(listing.repo, file.path, revision=listing.commit, endpoint=self.endpoint)
        headers = {**build_hf_headers(library_name="hydra"), "accept-encoding": "identity"}
        if begin:
            headers["range"] = f"bytes={begin}-"
        try:
            with (self._translated(listing.repo),
                  get_session().stream("GET", url, headers=headers, timeout=SILENCE_S) as reply):
                if reply.status_code in RETRIED:
                    raise ConnectionError(f"the server answered {reply.status_code}")
                hf_raise_for_status(reply)
                yield _begins_at(reply.status_code, reply.headers.get("content-range", "")), reply.iter_bytes(
                    CHUNK_BYTES)
        except httpx2.TransportError as error:
            raise ConnectionError(_why(error)) from error

    @contextmanager
    def _translated(self, repo: str, *, suggest: bool = False) -> Iterator[None]:
        import httpx2
        from huggingface_hub import errors as hub

        token = "HF_TOKEN holds one, or `hf auth login` keeps one; tokens are made at huggingface.co/settings/tokens."
        where = self.endpoint.partition("://")[2]
        try:
            yield
        except hub.GatedRepoError as error:
            raise ModelError(f"{repo} is given only to those who have agreed to its terms.",
                             f"Agree to them at {self.endpoint}/{repo}, then give your token: {token}") from error
        except hub.RevisionNotFoundError as error:
            raise ModelError(f"{repo} has no such revision.", "Leave it out, or name a branch, tag or commit.") \
                from error
        except hub.RepositoryNotFoundError as error:
            close = self.near(repo) if suggest else []
            mean = f"Did you mean {' or '.join(close)}? " if close else "Check its name. "
            raise ModelError(f"There is no repository {repo} at {where}, or it is private.",
                             f"{mean}A private one needs a token: {token}") from error
        except hub.RemoteEntryNotFoundError as error:
            raise ModelError(f"{repo} does not have the file any more.", "Run it again: the list is then new.") \
                from error
        except hub.OfflineModeIsEnabled as error:
            raise ModelError("HF_HUB_OFFLINE is set: nothing is fetched.", "Unset it.") from error
        except hub.HFValidationError as error:
            raise ConfigError(f"{repo} cannot be the name of a repository: {error}", "It is owner/repository.") \
                from error
        except hub.HfHubHTTPError as error:
            status = error.response.status_code
            mend = f"Your token is not taken: {token}" if status in (401, 403) else "Try again later."
            raise ModelError(f"{where} answered {status} for {repo}.", mend) from error
        except httpx2.TransportError as error:
            if not suggest:
                raise  # in the middle of a file: it is tried again
            raise ModelError(f"{where} cannot be reached: {_why(error)}.",
                             "Check the network and, behind a proxy, HTTPS_PROXY. A file that was fetched elsewhere "
                             "only has to be copied.") from error


def _begins_at(status: int, content_range: str) -> int:
    """Where a reply's bytes begin: a server that knows no ranges answers 200 and begins at 0."""
    found = re.match(r"bytes (\d+)-", content_range)
    return int(found[1]) if status == 206 and found else 0


def _why(error: BaseException) -> str:
    """The reason of a transport error in few words."""
    return (str(error) or type(error).__name__).rstrip(".")


# ---- fetching ------------------------------------------------------------------------------------------------------

Progress = Callable[[int], None]  # bytes of this file that are there
Retry = Callable[[str, float], None]  # why, and how long until the next try


def part_path(folder: Path, file: RemoteFile) -> Path:
    """Where a file grows. Its checksum is in the name: another version of it is not continued."""
    return folder / f"{file.name}.{(file.sha256 or file.git_sha1)[:12]}.part"


def there(folder: Path, file: RemoteFile) -> bool:
    """Whether the whole file is in its place. Raises: ModelError where another one is."""
    path = folder / file.name
    if not path.exists():
        return False
    size = path.stat().st_size
    if size != file.size_bytes:
        raise ModelError(f"{path} is there already, but with {size} bytes and not {file.size_bytes}.",
                         "It is of another version: move it away, use --to FOLDER, or replace it with --force.")
    return True


def missing_bytes(folder: Path, files: Sequence[RemoteFile]) -> int:
    """What is still to be fetched."""
    total = 0
    for file in files:
        part = part_path(folder, file)
        total += max(0, file.size_bytes - (part.stat().st_size if part.exists() else 0))
    return total


def check_space(folder: Path, needed: int) -> None:
    """Raises: ModelError with the numbers, where the disk has less."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelError(f"{folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are to be fetched.",
                         "Make room, or name a folder on another disk with --to.")


def fetch(hub: Hub, listing: Listing, file: RemoteFile, folder: Path, *, on_progress: Progress, on_retry: Retry,
          sleep: Callable[[float], None] = time.sleep) -> Path:
    """The whole file, in its place, its checksum right. What was there of it is continued.

    Raises: ModelError; what has come by then stays as a part. KeyboardInterrupt likewise.
    """
    part = part_path(folder, file)
    with _opened(part) as out:
        digest = _Digest(file)
        digest.read(out, on_progress)
        failed = 0
        while out.tell() < file.size_bytes:
            before = out.tell()
            try:
                _go_on(hub, listing, file, out, digest, on_progress)
            except ConnectionError as error:
                why = _why(error)
            else:
                why = "the connection ended early"
            if out.tell() >= file.size_bytes:
                break
            failed = 0 if out.tell() > before else failed + 1
            if failed >= TRIES:
                raise ModelError(f"{file.name}: {why}, {TRIES} times in a row, with {out.tell() / 1e9:.1f} of "
                                 f"{file.size_bytes / 1e9:.1f} GB fetched.",
                                 "What has come is kept: the same command goes on from there.")
            pause = min(16.0, 2.0 ** max(0, failed - 1))
            on_retry(why, pause)
            sleep(pause)
        _written(out, lambda: os.fsync(out.fileno()))
        if out.tell() != file.size_bytes or not digest.right():
            part.unlink()
            raise ModelError(f"{file.name} arrived damaged: its checksum is {digest.told()}, not {digest.wanted}.",
                             "Nothing of it is kept: run the command again. If it happens again, suspect the network "
                             "or this box's memory.")
        target = folder / file.name
        part.replace(target)
    return target


def _go_on(hub: Hub, listing: Listing, file: RemoteFile, out: BinaryIO, digest: _Digest,
           on_progress: Progress) -> None:
    """Take what comes until it ends. Raises: ConnectionError, ModelError."""
    with hub.stream(listing, file, out.tell()) as (begin, chunks):
        if begin != out.tell():
            if begin:
                raise ConnectionError("the server sent another range than was asked for")
            out.seek(0)
            out.truncate()
            digest.begin()
        on_progress(out.tell())
        for chunk in chunks:
            if out.tell() + len(chunk) > file.size_bytes:
                raise ModelError(f"{file.name} is longer than the {file.size_bytes} bytes that the server announced.",
                                 "A proxy may have answered in its place: try another network.")
            _written(out, lambda data=chunk: out.write(data))  # type: ignore[misc]
            digest.add(chunk)
            on_progress(out.tell())


def _written(out: BinaryIO, write: Callable[[], object]) -> None:
    """Raises: ModelError where the disk does not take it."""
    try:
        write()
        out.flush()
    except OSError as error:
        hint = "Make room, then run the same command: it goes on." if error.errno == errno.ENOSPC else \
            "Check the disk and its permissions."
        raise ModelError(f"{out.name} cannot be written: {error.strerror}.", hint) from error


class _Digest:
    """The checksum of what has come so far: SHA-256, or git's SHA-1 for what is not in LFS."""

    def __init__(self, file: RemoteFile) -> None:
        self.file = file
        self.wanted = file.sha256 or file.git_sha1
        self.begin()

    def begin(self) -> None:
        self._hash: Any = hashlib.sha256() if self.file.sha256 else hashlib.sha1(
            f"blob {self.file.size_bytes}\0".encode(), usedforsecurity=False)

    def add(self, data: bytes) -> None:
        self._hash.update(data)

    def read(self, out: BinaryIO, on_progress: Progress) -> None:
        """Take in what a file has, and leave it at its end; more than there should be is thrown away."""
        out.seek(0)
        while data := out.read(CHUNK_BYTES):
            self.add(data)
            on_progress(min(out.tell(), self.file.size_bytes))
        if out.tell() > self.file.size_bytes:
            out.seek(0)
            out.truncate()
            self.begin()

    def told(self) -> str:
        return str(self._hash.hexdigest())

    def right(self) -> bool:
        return self.told() == self.wanted


@contextmanager
def _opened(part: Path) -> Iterator[BinaryIO]:
    """The part file, for this process alone."""
    try:
        out = part.open("r+b" if part.exists() else "w+b")
    except OSError as error:
        raise ModelError(f"{part} cannot be written: {error.strerror}.", "Name another folder with --to.") from error
    with out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(f"{part.name} is being fetched by another process.", "Wait for it to end.") from None
        yield out


def is_right(folder: Path, file: RemoteFile, on_progress: Progress) -> bool:
    """Whether the file in its place has the right checksum; reads all of it."""
    digest, done = _Digest(file), 0
    with (folder / file.name).open("rb") as whole:
        while data := whole.read(CHUNK_BYTES):
            digest.add(data)
            done += len(data)
            on_progress(done)
    return digest.right()
