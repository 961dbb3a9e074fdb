"""Child processes of the benchmarks: they listen, are weighed, and end, whatever they do."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from hydra.bench import nagle
from hydra.bench.process import Child, MemoryWatch, cpu_seconds, free_port, memory_of, process_tree
from hydra.errors import HydraError

MIB = 1 << 20


def python(code: str, pipe: bool = False) -> Child:
    return Child([sys.executable, "-c", code], pipe=pipe)


def test_a_listener_is_noticed_without_connecting() -> None:
    port = free_port()
    code = f"""
import socket
server = socket.create_server(('127.0.0.1', {port}))
server.settimeout(20)
server.accept()
print('visited')
"""
    with python(code) as child:
        child.wait_listening(port, 20)
        assert child.process.poll() is None
        assert "visited" not in child.log_tail()


def test_a_child_that_ends_first_is_reported_with_its_last_words() -> None:
    with python("import sys; sys.exit('no device here')") as child:
        with pytest.raises(HydraError, match="no device here"):
            child.wait_listening(free_port(), 20)


def test_a_child_that_never_listens_is_given_up() -> None:
    with python("import time; time.sleep(60)") as child:
        with pytest.raises(HydraError, match="within 0 s"):
            child.wait_listening(free_port(), 0.2)


def test_a_child_that_will_not_end_is_killed() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = python(code, pipe=True)
    assert child.process.stdout is not None and child.process.stdout.readline() == b"up\n"
    child.close(timeout_s=0.3)
    assert child.process.returncode == -9
    child.close()


def test_what_a_child_needs_for_a_moment_is_seen() -> None:
    code = """
import sys
print(1, flush=True); sys.stdin.close()
import time; time.sleep(0.3)
block = bytearray(96 << 20)
del block
print(2, flush=True)
time.sleep(30)
"""
    with python(code, pipe=True) as child:
        assert child.process.stdout is not None
        child.process.stdout.readline()
        with MemoryWatch(child.pid) as watch:
            child.process.stdout.readline()
        assert watch.before.rss_bytes > MIB
        assert watch.peak_bytes - watch.before.rss_bytes > 90 * MIB
        assert watch.after.rss_bytes - watch.before.rss_bytes < 50 * MIB


def test_descendants_count() -> None:
    code = """
import subprocess, sys
subprocess.run([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(30)'])
"""
    with python(code, pipe=True) as child:
        assert child.process.stdout is not None
        child.process.stdout.readline()
        pids = process_tree(child.pid)
        assert len(pids) == 2 and memory_of(pids).rss_bytes > memory_of(pids[:1]).rss_bytes
        assert cpu_seconds(pids) > 0
    for pid in pids[1:]:
        os.kill(pid, 9)
    assert process_tree(child.pid) == [] and memory_of([child.pid]).rss_bytes == 0


def test_the_option_is_taken_from_a_connected_socket_and_from_no_other() -> None:
    if sys.platform != "linux":
        pytest.skip("pidfd_getfd is Linux's")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), timeout=10)
        far, _ = listener.accept()
        for sock in (near, far, listener):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with nagle.without_nodelay(os.getpid()) as thief:
                assert thief.sockets >= 2
        except HydraError as error:
            assert "borrowed" in error.message
            pytest.skip("this container does not let a process borrow sockets")
        with near, far:
            assert [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in (near, far)] == [0, 0]
            assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_the_relay_holds_every_byte_and_changes_none() -> None:
    from hydra.bench.process import worker_command

    delay_s = 0.15
    payload = os.urandom(3 * MIB)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        port = free_port()
        target = f"127.0.0.1:{server.getsockname()[1]}"
        arguments = ["--listen", f"127.0.0.1:{port}", "--forward", target, "--delay", str(delay_s)]
        with Child(worker_command("relay", arguments)) as relay:
            relay.wait_listening(port, 20)
            with socket.create_connection(("127.0.0.1", port), timeout=20) as near:
                far, _ = server.accept()
                with far:
                    far.settimeout(20)
                    began = time.perf_counter()
                    sender = threading.Thread(target=near.sendall, args=(payload,), daemon=True)
                    sender.start()
                    got = far.recv(MIB)
                    assert time.perf_counter() - began >= delay_s
                    while len(got) < len(payload):
                        got += far.recv(MIB)
                    assert got == payload
                    far.sendall(b"reply")
                    assert near.recv(5, socket.MSG_WAITALL) == b"reply"
                    sender.join(20)
                    near.shutdown(socket.SHUT_WR)
                    assert far.recv(1) == b""


def test_the_relay_closes_when_there_is_no_peer(tmp_path: Path) -> None:
    from hydra.bench.process import worker_command

    port = free_port()
    arguments = ["--listen", f"127.0.0.1:{port}", "--forward", f"127.0.0.1:{free_port()}", "--delay", "0"]
    with Child(worker_command("relay", arguments)) as relay:
        relay.wait_listening(port, 20)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as near:
            assert near.recv(1) == b""
