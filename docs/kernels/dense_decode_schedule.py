"""Draws dense_decode_schedule.png: how the three warpgroups of the dense decode kernel overlap (not to scale).

python docs/kernels/dense_decode_schedule.py [FILE.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLOCKS = 5
PERIOD, QK, PV, SOFTMAX, LOAD = 10.0, 6.0, 3.8, 3.8, 9.0  # of one KV block, in arbitrary units
STAGES = 3
LANES = (
    "warpgroup 0: scores",
    "warpgroup 1: output half 0",
    "warpgroup 2: output half 1",
    "loads of half 1 of K (TMA)",
    "tensor cores",
)
COLOURS = {"load": "#b8c4d6", "qk": "#3f7cac", "softmax": "#e3b23c", "pv": "#c8553d"}


def draw(path: Path) -> None:
    figure, axes = plt.subplots(figsize=(11, 4.4))
    height = dict(zip(LANES, (4, 3, 2, 1, 0), strict=True))
    scores, half0, half1, loads, tensor = LANES

    def bar(lane: str, begin: float, length: float, kind: str, text: str, offset: float = 0.0, size: float = 0.6):
        axes.barh(height[lane] + offset, length, size, begin, color=COLOURS[kind], edgecolor="white", linewidth=1.2)
        axes.text(begin + length / 2, height[lane] + offset, text, ha="center", va="center", fontsize=7.5)

    bar(loads, -LOAD - 0.4, LOAD, "load", f"K(0) … K({STAGES - 1})")
    for n in range(BLOCKS):
        qk, late = n * PERIOD, (n + 1) * PERIOD + QK
        bar(scores, qk, QK, "qk", f"Q Kᵀ({n})")
        bar(scores, qk + QK, SOFTMAX, "softmax", f"softmax({n})")
        bar(tensor, qk, QK, "qk", f"Q Kᵀ({n})")
        if n < BLOCKS - 1:
            for half, (lane, offset) in enumerate(((half0, 0.16), (half1, -0.16))):
                bar(lane, late, PV, "pv", f"P V({n})")
                bar(tensor, late, PV, "pv", f"P V({n}){'₀₁'[half]}", offset, 0.3)
                arrow(axes, (late - 0.3, 3.7), (late, height[lane] + 0.33), "p_full" if n == half == 0 else "")
        if n < BLOCKS - 2:
            bar(loads, late + PV, LOAD, "load", f"K({n + STAGES}) → stage {n % STAGES}")
            arrow(axes, (late + PV, 1.68), (late + PV + 0.4, 1.31), "half_empty[1]" if n == 0 else "")
    axes.set_yticks([height[lane] for lane in LANES], LANES)
    axes.set_xlim(-LOAD - 1, BLOCKS * PERIOD)
    axes.set_ylim(-0.5, 4.5)
    axes.set_xticks([])
    axes.set_xlabel("time (not to scale)")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    title = "Dense decode on one SM: the softmax of a block runs under P V of the block before"
    axes.set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def arrow(axes, begin: tuple[float, float], end: tuple[float, float], text: str) -> None:
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": "0.25", "linewidth": 0.9})
    if text:
        middle = ((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2)
        axes.annotate(text, middle, (6, 2), textcoords="offset points", fontsize=7, color="0.25", va="center")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
