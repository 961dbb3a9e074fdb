"""README.md says what is there: its commands, its piece of hydra.toml, its settings, its links."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_two_commands_are_on_the_first_screen():
    first_screen = README.splitlines()[:20]
    assert any(line.startswith("bash build/demo.sh") for line in first_screen)
    assert any(line.startswith("bash build/test.sh") for line in first_screen)


def test_the_piece_of_hydra_toml_is_a_piece_of_the_example():
    (block,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    shown = tomllib.loads(block)
    example = tomllib.loads((ROOT / "hydra.toml.example").read_text())
    assert shown["model"].items() <= example["model"].items()
    nodes = {node["name"]: node for node in example["nodes"]}
    for node in shown["nodes"]:
        assert node.items() <= nodes[node["name"]].items()


def test_the_settings_of_the_build_are_all_there():
    known = set(re.findall(r"^#   ([A-Z_]+) ", (ROOT / "build" / "lib.sh").read_text(), re.MULTILINE))
    told = {name for row in re.findall(r"^\| (`[A-Z_]+.*?) \|", README, re.MULTILINE)
            for name in re.findall(r"`([A-Z][A-Z_]+)", row)}  # fmt: skip
    assert "HYDRA_CUDA" in known
    assert known <= told


def test_the_files_that_it_names_exist():
    named = set(re.findall(r"\]\(([\w./-]+)\)", README)) | set(re.findall(r"`(build/[\w.-]+)`", README))
    assert named
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing


def test_the_commands_that_it_names_exist():
    from typer.main import get_command

    from hydra.cli import app

    command = get_command(app)
    names = command.list_commands(None)  # type: ignore[attr-defined]
    told = set(re.findall(r"`(?:\.venv/bin/)?hydra ([a-z]+)", README))
    assert told <= set(names), f"README names commands that do not exist: {sorted(told - set(names))}"
