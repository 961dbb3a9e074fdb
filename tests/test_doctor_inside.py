"""hydra/doctor/inside.py: what llama.cpp says of itself, and an inner process that dies, hangs or is another."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hydra.doctor import inside
from hydra.doctor.finding import Finding
from tests.doctor_support import of, one


def run(question: inside.Question | None = None) -> list[Finding]:
    return list(inside.run(question or inside.Question(device="CPU")))


def child(code: str, limit_s: float = 20.0) -> list[Finding]:
    return list(inside.run(inside.Question(), limit_s, [sys.executable, "-c", code]))


def test_this_box():
    found = run(inside.Question(device="CPU", type_k="q8_0", type_v="q8_0", head_dims=(64, 256)))
    assert not [finding for finding in found if finding.status == "fail"], found
    checks = {finding.check for finding in found}
    assert {"module name", "version", "RPC", "one registry", "private layout", "device CPU", "product on CPU"} <= checks
    assert len(of(found, "library", "flash attention")) == 2
    assert "libllama" in one(found, "library", "one registry").seen


def test_a_device_that_is_not_there():
    found = run(inside.Question(device="CUDA7", gpu="RTX 3060"))
    assert one(found, "gpu", "device CUDA7").status == "fail"
    assert one(found, "gpu", "GPU").status == "fail", "a card was asked for and ggml has none"


def test_another_card_than_the_file_says():
    found = run(inside.Question(device="CPU", gpu="RTX 3060", memory_gib=100_000))
    assert one(found, "gpu", "card").status == "warn" and "hydra.toml says RTX 3060" in one(found, "gpu", "card").seen
    assert one(found, "gpu", "memory").status == "warn"


def test_the_card_that_the_file_names():
    question = inside.Question(gpu="RTX 5060 Ti")
    (found,) = inside._against_the_file(question, "CUDA0", "NVIDIA GeForce RTX 5060 Ti", 16 << 30)
    assert found.status == "ok"


def test_a_process_that_dies():
    found = child("import os, sys; print('{\"begin\": \"product on CUDA0\"}', flush=True);"
                  "print('ggml_cuda: CUDA error: an illegal memory access', file=sys.stderr, flush=True); os.abort()")
    assert [finding.status for finding in found] == ["fail"]
    assert found[0].check == "product on CUDA0" and "signal 6" in found[0].seen and "illegal memory" in found[0].seen


def test_a_process_that_hangs():
    (found,) = child("import time; print('{\"begin\": \"devices\"}', flush=True); time.sleep(60)", limit_s=1.0)
    assert found.check == "devices" and "did not come back within 1 s" in found.seen


def test_two_registries():
    files = ["/a/libggml-base.so.0", "/a/libllama.so", "/b/libggml-base.so.0.25.3"]
    found = inside.check_registries(files)
    assert found.status == "fail" and "libggml-base is loaded 2 times" in found.seen
    assert inside.check_registries(files[:2]).status == "ok"


def test_two_registries_for_real(tmp_path):
    """A second copy of the very library, opened under another name as a wrong program would."""
    code = ("import ctypes, sys, shutil, json\nfrom hydra.ggml import library\nfrom hydra.doctor import inside\n"
            "library.load()\n"
            "shutil.copy(library.library_dir() / 'libggml-base.so.0', sys.argv[1] + '/libggml-base.so.0')\n"
            "ctypes.CDLL(sys.argv[1] + '/libggml-base.so.0')\n"
            "print(json.dumps(inside.check_registries(library.loaded_files()).to_dict()))")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["status"] == "fail" and str(tmp_path) in found["seen"]


def test_a_package_with_the_same_module_name(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.3.2")
    (found,) = inside.check_clash(inside.clashing_packages(), Path("/x/hydra"))
    assert found.status == "fail" and "hydra-core 1.3.2" in found.seen


def test_another_release_of_the_library(monkeypatch, capsys):
    from hydra.ggml import library

    library.load.cache_clear()
    monkeypatch.setattr(library, "PINNED_GGML", "0.99.0")
    monkeypatch.setattr(os, "_exit", lambda code: None)
    try:
        inside.main([json.dumps({"head_dims": [64]})])
    finally:
        library.load.cache_clear()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (found,) = [line for line in lines if line.get("status") == "fail"]
    assert "hydra is built for 0.99.0" in found["seen"] and "0.3.36" in found["fix"]


@pytest.mark.parametrize(("type_k", "type_v"), [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0")])
def test_the_cpu_has_flash_attention_for_all(type_k, type_v):
    from hydra.doctor import kernels
    from hydra.ggml import library
    from hydra.ggml.backend import pick_device

    ggml = library.load()
    device = pick_device(ggml, "CPU")
    types = (inside._CACHE_TYPES[type_k], inside._CACHE_TYPES[type_v])
    assert kernels.flash_attention_supported(ggml, device, *types, 128)
