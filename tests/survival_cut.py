"""`ip netns exec HEAD python -m tests.survival_cut HEAD PEER SILENCE_S`: an answer over a cable that is pulled out and
put back.

Run by tests/test_survival.py inside the head's network namespace; the peer runs in the other one. Prints one JSON
object.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

from tests.survival_support import STARTS, Peer, ask_all, expected, supervised, toy_split, until

HEAD_ADDRESS, PEER_ADDRESS = "198.51.100.1", "198.51.100.2"


async def scenario(head_netns: str, peer: Peer, silence_s: float, restart: bool) -> dict[str, object]:
    def cable(state: str) -> None:
        subprocess.run(["ip", "-n", head_netns, "link", "set", "veth0", state], check=True, timeout=10)

    async with supervised(peer, toy_split(peer), silence_s=silence_s) as (supervisor, events):

        async def fault() -> None:
            cable("down")
            if restart:
                await until(lambda: supervisor.ledger.total == 1)
            else:
                await asyncio.sleep(3.0)
            cable("up")

        start = time.monotonic()
        answers = await ask_all(supervisor, fault)
        return {
            "exact": answers == [expected(first) for first in STARTS],
            "restarts": supervisor.ledger.total,
            "reasons": [event.message for event in events if event.kind == "failure"],
            "seconds": time.monotonic() - start,
        }


def main(head_netns: str, peer_netns: str, silence_s: float, restart: bool) -> None:
    peer = Peer(PEER_ADDRESS, prefix=["ip", "netns", "exec", peer_netns], allow=(HEAD_ADDRESS,))
    try:
        print(json.dumps(asyncio.run(asyncio.wait_for(scenario(head_netns, peer, silence_s, restart), 80))))
    finally:
        peer.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4] == "restart")
