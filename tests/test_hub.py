"""hydra/hub.py against a stand-in for huggingface.co: references, choice, broken connections, checksums, refusals."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydra import hub
from hydra.errors import ConfigError, ModelError
from tests.hub_server import COMMIT, HubServer

REPO = "someone/Small-1B-GGUF"
BIG = random.Random(7).randbytes(3_500_000)


@pytest.fixture
def server(monkeypatch) -> Iterator[HubServer]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "")
    made = HubServer()
    made.repos[REPO] = {
        "README.md": b"about", "Small-1B-Q4_K_M.gguf": BIG, "Small-1B-BF16.gguf": b"bf16",
        "mmproj-Q4_K_M.gguf": b"pictures", "UD/Small-1B-UD-Q5_K_XL.gguf": b"q5",
        "Small-1B-Q8_0-00001-of-00002.gguf": b"one" * 1000, "Small-1B-Q8_0-00002-of-00002.gguf": b"two" * 1000,
        "Small-1B-Q6_K-00001-of-00003.gguf": b"lonely",
    }
    yield made
    made.close()


@pytest.mark.parametrize(("text", "want"), [
    ("a/b", hub.Reference("a/b")),
    ("a/b:Q5_K_M", hub.Reference("a/b", quant="Q5_K_M")),
    ("a/b/c.gguf", hub.Reference("a/b", "c.gguf")),
    ("a/b/sub/c.GGUF", hub.Reference("a/b", "sub/c.GGUF")),
    ("hf.co/a/b:Q8_0", hub.Reference("a/b", quant="Q8_0")),
    ("https://huggingface.co/a/b-1.5_x", hub.Reference("a/b-1.5_x")),
    ("https://huggingface.co/a/b/blob/main/c.gguf", hub.Reference("a/b", "c.gguf")),
    ("https://huggingface.co/a/b/resolve/v2/sub/c.gguf?download=true", hub.Reference("a/b", "sub/c.gguf", "", "v2")),
    ("https://huggingface.co/a/b/tree/main", hub.Reference("a/b")),
])
def test_references(text, want):
    assert hub.parse(text) == want


@pytest.mark.parametrize("text", ["", "a", "a/", "/b", "a/b/c.bin", "a/b:Q4/c.gguf", "https://example.org/a/b",
                                  "a b/c", "../../etc/passwd"])
def test_what_is_no_reference(text):
    with pytest.raises(ConfigError, match="is not a model of Hugging Face"):
        hub.parse(text)


def names(server: HubServer, text: str) -> list[str]:
    wanted = hub.parse(text)
    return [file.path for file in hub.choose(hub.Hub(server.url).listing(wanted), wanted)]


def test_choice(server):
    assert names(server, REPO) == ["Small-1B-Q4_K_M.gguf"], "as llama.cpp's -hf"
    assert names(server, f"{REPO}:bf16") == ["Small-1B-BF16.gguf"]
    assert names(server, f"{REPO}:Q5_K_XL") == ["UD/Small-1B-UD-Q5_K_XL.gguf"]
    parts = ["Small-1B-Q8_0-00001-of-00002.gguf", "Small-1B-Q8_0-00002-of-00002.gguf"]
    assert names(server, f"{REPO}:q8_0") == parts
    assert names(server, f"{REPO}/{parts[0]}") == parts
    assert names(server, f"{REPO}/{parts[1]}") == parts, "any part means the whole"
    assert names(server, f"{REPO}/small-1b-ud-q5_k_xl.gguf") == ["UD/Small-1B-UD-Q5_K_XL.gguf"], "without its folder"
    assert names(server, f"{REPO}/mmproj-Q4_K_M.gguf") == ["mmproj-Q4_K_M.gguf"], "by name, whatever it is"


def test_choices_that_fail_name_what_there_is(server):
    with pytest.raises(ModelError, match="nothing with the quant F16") as caught:
        names(server, f"{REPO}:F16")
    assert "Small-1B-BF16.gguf" in caught.value.hint and "mmproj" not in caught.value.hint
    with pytest.raises(ModelError) as caught:
        names(server, f"{REPO}/Small-1B-Q4_K_S.gguf")
    assert "Did you mean Small-1B-Q4_K_M.gguf" in caught.value.hint
    with pytest.raises(ModelError, match=r"lacks 2 of the 3 parts of this model, such as Small-1B-Q6_K-00002-of"):
        names(server, f"{REPO}:Q6_K")
    server.repos["someone/plain"] = {"model.safetensors": b"x"}
    with pytest.raises(ModelError, match="no GGUF file with a model in it"):
        names(server, "someone/plain")


def test_refusals(server, monkeypatch):
    with pytest.raises(ModelError, match="There is no repository someone/Smal-1B-GGUF") as caught:
        names(server, "someone/Smal-1B-GGUF")
    assert f"Did you mean {REPO}?" in caught.value.hint
    assert hub.Hub(server.url).near("somebody/Small-1B-GGUF") == [REPO], "a wrong owner is forgiven, too"
    assert hub.Hub(server.url).near("x/y") == []
    with pytest.raises(ModelError, match="no such revision"):
        hub.Hub(server.url).listing(hub.parse(REPO, "v9"))
    with pytest.raises(ModelError, match=r"127\.0\.0\.1:1 cannot be reached") as caught:
        hub.Hub("http://127.0.0.1:1").listing(hub.parse(REPO))
    assert "HTTPS_PROXY" in caught.value.hint
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        names(server, REPO)


class Fetcher:
    """Fetches into one folder, and keeps what was told."""

    def __init__(self, server: HubServer, folder: Path, text: str = REPO) -> None:
        self.hub = hub.Hub(server.url)
        wanted = hub.parse(text)
        self.listing = self.hub.listing(wanted)
        self.file = hub.choose(self.listing, wanted)[0]
        self.folder = folder
        self.told: list[int] = []
        self.retries: list[tuple[str, float]] = []

    def run(self) -> bytes:
        path = hub.fetch(self.hub, self.listing, self.file, self.folder, on_progress=self.told.append,
                         on_retry=lambda why, pause: self.retries.append((why, pause)), sleep=lambda _s: None)
        assert [each.name for each in self.folder.iterdir()] == [path.name], "no part is left over"
        return path.read_bytes()


def test_a_file(server, tmp_path):
    fetcher = Fetcher(server, tmp_path)
    assert fetcher.run() == BIG
    assert fetcher.told[0] == 0 and fetcher.told[-1] == len(BIG) and fetcher.told == sorted(fetcher.told)
    assert fetcher.listing.commit == COMMIT and not fetcher.retries
    assert hub.there(tmp_path, fetcher.file) and hub.is_right(tmp_path, fetcher.file, lambda _n: None)


def test_a_broken_connection_is_continued(server, tmp_path):
    server.faults = [("cut", 1_200_000), ("status", 503), ("reset", 1_000_000), ("cut", 0)]
    fetcher = Fetcher(server, tmp_path)
    assert fetcher.run() == BIG
    begins = [int((asked or "bytes=0-").removeprefix("bytes=").rstrip("-")) for asked in server.ranges]
    assert len(begins) == 5 and begins[0] == 0 and begins[1] > 1_000_000, "what had come was not fetched again"
    assert begins == sorted(begins)
    assert any("503" in why for why, _ in fetcher.retries)


def test_a_later_run_goes_on(server, tmp_path):
    server.faults = [("cut", 2_000_000)] + [("status", 502)] * hub.TRIES
    with pytest.raises(ModelError, match=rf"502, {hub.TRIES} times in a row, with 0.0 of 0.0 GB") as caught:
        Fetcher(server, tmp_path).run()
    assert "goes on from there" in caught.value.hint
    kept = next(tmp_path.iterdir())
    assert kept.name == f"Small-1B-Q4_K_M.gguf.{hashlib.sha256(BIG).hexdigest()[:12]}.part"
    size = kept.stat().st_size
    assert size > 1_000_000
    server.ranges.clear()
    fetcher = Fetcher(server, tmp_path)
    assert hub.missing_bytes(tmp_path, [fetcher.file]) == len(BIG) - size
    assert fetcher.run() == BIG and server.ranges == [f"bytes={size}-"]


def test_a_server_without_ranges_begins_anew(server, tmp_path):
    server.faults = [("cut", 2_000_000), ("whole",)]
    assert Fetcher(server, tmp_path).run() == BIG
    assert len(server.ranges) == 2
    (tmp_path / "Small-1B-Q4_K_M.gguf").unlink()
    server.faults = [("cut", 2_000_000), ("other",)]
    assert Fetcher(server, tmp_path).run() == BIG, "another range than was asked for is not taken"


def test_damage_is_found_and_not_kept(server, tmp_path):
    server.faults = [("bad",)]
    with pytest.raises(ModelError, match="arrived damaged: its checksum is"):
        Fetcher(server, tmp_path).run()
    assert list(tmp_path.iterdir()) == []
    server.faults = [("cut", 2_000_000), ("bad",)]
    with pytest.raises(ModelError, match="arrived damaged"):
        Fetcher(server, tmp_path).run()
    assert Fetcher(server, tmp_path).run() == BIG


def test_a_file_of_git_has_gits_sum(server, tmp_path):
    server.in_git.add("Small-1B-BF16.gguf")
    fetcher = Fetcher(server, tmp_path, f"{REPO}:BF16")
    assert fetcher.file.sha256 == "" and fetcher.run() == b"bf16"


def test_a_part_that_is_damaged_or_too_long(server, tmp_path):
    fetcher = Fetcher(server, tmp_path)
    hub.part_path(tmp_path, fetcher.file).write_bytes(BIG + b"more")
    assert fetcher.run() == BIG, "more than the whole is thrown away"
    hub.part_path(tmp_path, fetcher.file).write_bytes(BIG)
    (tmp_path / "Small-1B-Q4_K_M.gguf").unlink()
    server.ranges.clear()
    assert fetcher.run() == BIG and server.ranges == [], "a whole part is only checked"


def test_gated(server, tmp_path, monkeypatch):
    server.gated.add(REPO)
    with pytest.raises(ModelError, match="only to those who have agreed to its terms") as caught:
        Fetcher(server, tmp_path).run()
    assert f"{server.url}/{REPO}" in caught.value.hint and "HF_TOKEN" in caught.value.hint
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert Fetcher(server, tmp_path).run() == BIG
    assert set(server.cdn_tokens) == {None}, "the token goes to the hub and nowhere else"


def test_two_at_once_and_another_version(server, tmp_path):
    fetcher = Fetcher(server, tmp_path)
    with hub._opened(hub.part_path(tmp_path, fetcher.file)):
        with pytest.raises(ModelError, match="being fetched by another process"):
            fetcher.run()
    (tmp_path / fetcher.file.name).write_bytes(b"older")
    with pytest.raises(ModelError, match="with 5 bytes and not 3500000"):
        hub.there(tmp_path, fetcher.file)


def test_space(tmp_path):
    with pytest.raises(ModelError, match=r"GB free, and 9\d+\.0 GB are to be fetched"):
        hub.check_space(tmp_path, 99_000_000 * 10**9)


def test_a_folder_that_cannot_be_written(server, tmp_path):
    (tmp_path / "file").write_text("")
    fetcher = Fetcher(server, tmp_path / "file")
    with pytest.raises(ModelError, match="cannot be written"):
        fetcher.run()
