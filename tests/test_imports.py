"""The import table of docs/architecture.md, held by a walk over the source; and a start that loads nothing heavy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hydra"
# errors ← config, rpc, ggml ← plan, link ← peer | head ← api, doctor, bench ← cli.  A unit imports only from levels
# below its own, and from SAME at its own level. A new module has to be given its place here.
LEVELS = [
    {"errors", "__init__"},
    {"keys", "config", "nodes", "model_file", "embedded", "hub", "hardware", "console", "security", "service", "rpc",
     "ggml"},
    {"plan", "link"},
    {"peer", "head"},
    {"api", "doctor", "bench"},
    {"commands", "cli", "__main__"},
]
SAME = {("bench", "doctor"), ("config", "keys"), ("nodes", "config"), ("commands", "cli"), ("cli", "commands"),
        ("__main__", "cli")}
LEVEL = {unit: number for number, units in enumerate(LEVELS) for unit in units}


def imported(path: Path) -> set[str]:
    """Full names of every module or member that the file imports, anywhere in it."""
    package = ["hydra", *path.relative_to(PACKAGE).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{stem}.{alias.name}" for alias in node.names}
    return found


def unit_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_imports_go_one_way(path):
    unit = unit_of(path)
    assert unit in LEVEL, f"give {unit} its place in docs/architecture.md and in LEVELS"
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "hydra" or len(parts) < 2:
            continue
        other = parts[1] if (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file() else "__init__"
        assert other == unit or (unit, other) in SAME or LEVEL[other] < LEVEL[unit], f"{unit} must not import {name}"


def test_only_one_module_imports_llama_cpp():
    users = [str(path.relative_to(PACKAGE)) for path in FILES
             if any(name.split(".")[0] == "llama_cpp" for name in imported(path))]
    assert users in ([], ["head/llama.py"])


def modules_after(*arguments: str) -> set[str]:
    code = ("import sys, json\nfrom hydra.cli import run\ncode = run(sys.argv[1:])\n"
            "sys.stderr.write('\\n' + json.dumps(sorted(sys.modules)))\nsys.exit(code)")
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["chat", "--help"], ["config", "--help"],
                                       ["version"]])
def test_help_loads_nothing_heavy(arguments):
    loaded = modules_after(*arguments)
    for heavy in ("llama_cpp", "numpy", "rich", "starlette", "uvicorn", "httpx", "prompt_toolkit", "psutil", "asyncio",
                  "gguf", "cryptography", "huggingface_hub", "httpx2"):
        assert heavy not in loaded, f"hydra {' '.join(arguments)} imports {heavy}"


def test_the_check_itself_sees_heavy_imports(tmp_path):
    loaded = modules_after("cache", "list", "--cache-dir", str(tmp_path))
    assert "numpy" in loaded, "the weights' layouts need numpy, so this must show"
