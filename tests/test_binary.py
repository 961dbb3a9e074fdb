"""dist/hydra, the one file, as build/binary.sh made it: it starts without Python, and it leaves nothing behind.

Skipped where there is no dist/hydra: building it takes minutes, so that is for whoever changes it and for releases.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hydra import __version__
from hydra.commands.child import free_ports
from hydra.embedded import cache_home

ROOT = Path(__file__).parent.parent
FILE = ROOT / "dist" / "hydra"
MODEL = cache_home() / "models" / "gemma-3-270m-q4_k_m.gguf"


pytestmark = [pytest.mark.binary,
              pytest.mark.skipif(not FILE.exists(), reason="no dist/hydra: build/binary.sh makes it")]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def run(home, tmp_path):
    """Runs the file with a home of its own, a /tmp of its own, and no Python in sight."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin", "TMPDIR": str(scratch), "LANG": "C.UTF-8"}

    def start(*arguments: str, timeout: float = 100, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(FILE), *arguments], env={**env, **more}, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=timeout, cwd=tmp_path)

    start.env = env  # type: ignore[attr-defined]
    start.scratch = scratch  # type: ignore[attr-defined]
    return start


def test_versions(run):
    done = run("version", "--json")
    found = json.loads(done.stdout)
    assert (found["hydra"], found["ggml_rpc"], found["llama_cpp_python"]) == (__version__, "7.0.0", "0.3.36")
    # Of finished libraries nobody knows for which CPU they are.
    built = found["one_file"]
    assert (built["variant"], built["cpu"]) in (("cpu", "x86-64-v3"), ("cuda", "x86-64-v3"), ("own", ""))
    assert list(run.scratch.iterdir()) == []


def test_every_command_is_inside(run):
    listed = run("--help").stdout.partition("Commands:")[2]
    names = re.findall(r"^  (\S+)", listed, re.M)
    assert {"up", "peer", "chat", "doctor", "demo", "service", "bench", "plan"} <= set(names)
    for name in names:
        assert run(name, "--help").stdout.startswith("Usage: hydra"), name
    wrote = run("init", "--model", "m.gguf", "--head", "127.0.0.1", "--peer", "192.0.2.7", "--role", "head")
    assert wrote.returncode == 0, wrote.stderr  # it reads hydra.toml.example


def test_certificates_are_made(run, tmp_path):
    text = (ROOT / "hydra.toml.example").read_text()
    text = text.replace('# cert_dir = "~/.config/hydra/certs"', 'cert_dir = "certs"')
    (tmp_path / "hydra.toml").write_text(text)
    done = run("certs", "init", "--json")
    assert done.returncode == 0, done.stderr
    assert {"ca.pem", "mini.key", "mini.pem", "tower.pem"} <= {path.name for path in (tmp_path / "certs").iterdir()}


def test_in_the_background_it_outlives_its_starter(run, tmp_path):
    (peer_port, api_port) = free_ports(2)
    (tmp_path / "hydra.toml").write_text(
        f'[model]\npath = "m.gguf"\n[head]\napi_port = {api_port}\n'
        '[[nodes]]\nname = "a"\nrole = "head"\nhost = "127.0.0.1"\nlayers = "auto"\n'
        f'[[nodes]]\nname = "b"\nrole = "peer"\nhost = "127.0.0.1"\nport = {peer_port}\nlayers = 1\ndevice = "CPU"\n')
    try:
        started = run("up", "--detach", "--node", "b")
        assert started.returncode == 0, started.stderr
        assert "Serving" in run("logs", "--node", "b").stdout
    finally:
        stopped = run("down", "--node", "b")
    assert stopped.returncode == 0, stopped.stderr


def test_the_demo_says_that_the_model_is_not_inside(run):
    done = run("demo")
    assert done.returncode == 7 and "--model FILE" in done.stderr


def test_each_library_is_there_and_loaded_once(run):
    """The doctor's own look, in a process of its own as for a user: versions, backends, and no library twice."""
    done = run("doctor", "--json")
    findings = [f for f in json.loads(done.stdout.splitlines()[-1])["findings"] if f["group"] == "library"]
    assert len(findings) > 2 and [f for f in findings if f["status"] == "fail"] == []


@pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")
def test_what_the_libraries_need_is_inside_except_the_c_library_and_the_driver(run, home):
    """Read from the files, so nothing of the box on which the test runs can stand in for what is missing."""
    run("version")
    (program,) = [path for path in (home / ".cache/hydra/bin").iterdir() if path.is_dir()]
    files = [path for path in program.rglob("*") if path.is_file() and re.search(r"\.so(\.|$)", path.name)]
    inside = {path.name for path in files}
    needed, searched = set(), set()
    for path in files:
        text = subprocess.run(["readelf", "-dW", str(path)], capture_output=True, text=True, check=True,
                              env={"LC_ALL": "C", "PATH": os.environ["PATH"]}).stdout
        needed |= set(re.findall(r"Shared library: \[([^\]]+)", text))
        searched |= {place for places in re.findall(r"Library r(?:un)?path: \[([^\]]*)", text)
                     for place in places.split(":")}
    glibc = r"(ld-linux-x86-64|lib(c|m|dl|rt|util|pthread|resolv))\.so\.\d"
    outside = {name for name in needed - inside if not re.fullmatch(glibc, name)}
    if json.loads(run("version", "--json").stdout)["one_file"]["variant"] != "own":
        assert outside <= {"libcuda.so.1"}
    assert len(files) > 20 and all(place.startswith("$ORIGIN") for place in searched)


def test_programs_of_the_box_do_not_see_our_libraries(run, tmp_path):
    """A program that hydra starts tells its environment: here systemctl, as `hydra service status` calls it."""
    fake = tmp_path / "systemctl"
    fake.write_text('#!/bin/sh\necho "ActiveState=active"; echo "SubState=$LD_LIBRARY_PATH"\n')
    fake.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    assert json.loads(run("service", "status", "--json", PATH=path).stdout)["substate"] == ""
    own = run("service", "status", "--json", PATH=path, LD_LIBRARY_PATH="/opt/theirs")
    assert json.loads(own.stdout)["substate"] == "/opt/theirs"


def test_the_unit_names_the_file_and_not_the_unpacked_program(run, tmp_path):
    (tmp_path / "hydra.toml").write_text((ROOT / "hydra.toml.example").read_text())
    done = run("service", "install", "--dry-run", "--node", "mini")
    # The configuration of a test lies in /tmp, which is refused; what is named in the unit is tested without.
    assert done.returncode in (0, 2)
    if done.returncode == 0:
        assert f"ExecStart={FILE} up" in done.stdout


@pytest.mark.skipif(not MODEL.exists(), reason="the embedded model has not been put together in the cache")
def test_demo_from_a_model_file(run):
    done = run("demo", "--json", "-n", "8", "--model", str(MODEL))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["identical_to_local"] and len(found["tokens"]) == 8
    assert list(run.scratch.iterdir()) == []


def test_killed_it_leaves_no_files_and_no_processes(run):
    (port,) = free_ports(1)
    process = subprocess.Popen([str(FILE), "peer", "--bind", f"127.0.0.1:{port}", "--device", "CPU"], env=run.env,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        deadline = time.monotonic() + 60
        while b"Serving" not in process.stderr.readline():
            assert time.monotonic() < deadline and process.poll() is None
        children = _below(process.pid)
        assert children  # the worker: the same program again
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in children if _alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == [] and list(run.scratch.iterdir()) == []


def _below(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    found = [int(word) for word in text.split()]
    return found + [below for child in found for below in _below(child)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
