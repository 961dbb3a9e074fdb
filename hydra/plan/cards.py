"""Memory and bandwidth of common cards, from their makers' data sheets.

A measured figure (`hydra bench device`, or bandwidth_gbs in hydra.toml) is better than any of these.
"""

from __future__ import annotations

import re

# Part of the card's name → GiB, GB/s by data sheet. The longest name that fits counts.
CARDS: dict[str, tuple[float, float]] = {
    "rtx 5090": (32, 1792), "rtx 5080": (16, 960), "rtx 5070 ti": (16, 896), "rtx 5070": (12, 672),
    "rtx 5060 ti": (16, 448), "rtx 5060": (8, 448), "rtx 5050": (8, 320),
    "rtx 4090": (24, 1008), "rtx 4080 super": (16, 736), "rtx 4080": (16, 717), "rtx 4070 ti super": (16, 672),
    "rtx 4070 ti": (12, 504), "rtx 4070 super": (12, 504), "rtx 4070": (12, 504), "rtx 4060 ti": (16, 288),
    "rtx 4060": (8, 272),
    "rtx 3090 ti": (24, 1008), "rtx 3090": (24, 936), "rtx 3080 ti": (12, 912), "rtx 3080": (10, 760),
    "rtx 3070 ti": (8, 608), "rtx 3070": (8, 448), "rtx 3060 ti": (8, 448), "rtx 3060": (12, 360), "rtx 3050": (8, 224),
    "rtx 2080 ti": (11, 616), "rtx 2080 super": (8, 496), "rtx 2080": (8, 448), "rtx 2070": (8, 448),
    "rtx 2060": (6, 336), "gtx 1080 ti": (11, 484), "gtx 1080": (8, 320), "gtx 1070": (8, 256), "tesla p40": (24, 347),
    "titan rtx": (24, 672), "tesla p100": (16, 732), "tesla v100": (32, 900), "tesla t4": (16, 320),
    "rtx a2000": (12, 288), "rtx a4000": (16, 448), "rtx a4500": (20, 640), "rtx a5000": (24, 768),
    "rtx a6000": (48, 768), "rtx 4000 ada": (20, 360), "rtx 4500 ada": (24, 432), "rtx 5000 ada": (32, 576),
    "rtx 6000 ada": (48, 960), "rtx pro 6000": (96, 1792), "rtx pro 4000": (24, 672), "nvidia l4": (24, 300),
    "nvidia l40s": (48, 864), "nvidia a10": (24, 600), "nvidia a40": (48, 696), "a100": (80, 1935), "h100": (80, 3350),
    "h200": (141, 4800), "b200": (180, 8000), "rx 7900 xtx": (24, 960), "rx 7900 xt": (20, 800),
    "rx 7800 xt": (16, 624),
    "rx 9070 xt": (16, 640), "rx 6800": (16, 512), "arc a770": (16, 560), "arc b580": (12, 456),
}  # fmt: skip
# Of the data sheet's figure, what decode reaches with large matrices.
EFFICIENCY = 0.82


def find(name: str) -> tuple[float, float] | None:
    """(GiB, GB/s) of a card by its name; None where it is not known."""
    plain = f" {_plain(name)} "
    fitting = [card for card in CARDS if f" {card} " in plain]
    return CARDS[max(fitting, key=len)] if fitting else None


def _plain(name: str) -> str:
    """`NVIDIA GeForce RTX5060Ti 16GB` → `nvidia geforce rtx 5060 ti 16gb`."""
    text = re.sub(r"[^a-z0-9]+", " ", name.lower())
    text = re.sub(r"\b(rtx|gtx|rx)(\d)", r"\1 \2", text)
    return re.sub(r"\b(\d{4})(ti|super|xt|xtx)\b", r"\1 \2", text).strip()
