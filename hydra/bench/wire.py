"""`hydra bench wire`: where a token's time goes in the peer, command by command.

The peer keeps times when it is asked to at its start and hands them out at /stats?timings; a head decodes meanwhile.
Times are of the handling alone, from the message being there to its reply being with the kernel: on a CPU device
GRAPH_* holds the arithmetic too, on a GPU only its launch, and the arithmetic is waited for in GET_TENSOR. Knows
nothing of how the peer counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.bench.pairs import Report, Setting, run_head, start
from hydra.bench.run_head import HeadSpec


@dataclass(frozen=True)
class WireFigures:
    """Per command: count, bytes_in, bytes_out, p50_us, p99_us, total_ms; and the decode that they belong to."""

    commands: dict[str, dict[str, float]]
    tokens: int
    decode_tps: float

    def to_dict(self) -> dict[str, Any]:
        return {"commands": self.commands, "tokens": self.tokens, "decode_tps": self.decode_tps}

    def rows(self) -> list[list[str]]:
        """For a table, the costliest command first."""
        ordered = sorted(self.commands.items(), key=lambda item: -item[1].get("total_ms", 0.0))
        return [
            [
                name,
                f"{row['count']:,.0f}",
                f"{row['bytes_in']:,.0f}",
                f"{row['bytes_out']:,.0f}",
                f"{row['p50_us']:.1f}" if "p50_us" in row else "–",
                f"{row['p99_us']:.1f}" if "p99_us" in row else "–",
                f"{row.get('total_ms', 0.0):.1f}",
            ]
            for name, row in ordered
        ]


COLUMNS = ("command", "count", "bytes in", "bytes out", "median µs", "p99 µs", "total ms")


def run(model: Path, setting: Setting, tokens: int, prompt: int, report: Report) -> WireFigures:
    """Decode ``tokens`` after a prompt of ``prompt`` tokens with hydra's peer, and take its times.

    Raises: HydraError when the peer or the head fails.
    """
    spec = HeadSpec(
        str(model), threads=setting.threads, prompts=(prompt,) if prompt else (), decode_tokens=tokens, stats=True
    )
    with start("hydra", setting, timings=True) as peer:
        report(f"decoding {tokens} tokens")
        result, _ = run_head(spec, peer)
    return WireFigures(result.stats.get("commands", {}), tokens, result.decode_tps)
