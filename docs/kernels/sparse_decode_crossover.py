"""Draws sparse_decode_crossover.png: who dequantizes which tokens of a block, and where they go (not to scale).

python docs/kernels/sparse_decode_crossover.py [FILE.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

COLOURS = {"cache": "#b8c4d6", "first": "#e3b23c", "second": "#7fb069", "work": "#3f7cac", "frame": "0.35"}


def draw(path: Path) -> None:
    figure, axes = plt.subplots(figsize=(11, 4.6))
    axes.set_xlim(0, 22)
    axes.set_ylim(0, 9.2)
    axes.axis("off")

    box(axes, 0.3, 0.6, 3.4, 7.6, COLOURS["cache"], "")
    axes.text(2.0, 8.45, "FP8 cache (global memory)", ha="center", fontsize=9)
    axes.text(2.0, 7.6, "64 tokens that the\nindices of a block name", ha="center", va="center", fontsize=7.5)
    box(axes, 0.7, 4.3, 2.6, 2.5, COLOURS["first"], "tokens 0-31\n656 bytes each")
    box(axes, 0.7, 1.0, 2.6, 2.5, COLOURS["second"], "tokens 32-63\n656 bytes each")

    for rank, base in ((0, 4.7), (1, 0.5)):
        own, other = ("first", "second") if rank == 0 else ("second", "first")
        frame = FancyBboxPatch((5.2, base), 16.4, 3.7, "round,pad=0.05", fill=False, ec=COLOURS["frame"], lw=1.2)
        axes.add_patch(frame)
        axes.text(21.4, base + 3.35, f"CTA {rank} of the cluster: heads {64 * rank}-{64 * rank + 63}", ha="right",
                  fontsize=8.5)
        box(axes, 5.6, base + 0.9, 3.3, 1.9, COLOURS[own], "warpgroups 1-3\ndequantize\ne4m3 × scale → bf16")
        first, second = (own, other) if rank == 0 else (other, own)
        box(axes, 11.3, base + 1.85, 3.0, 1.15, COLOURS[first], "K rows 0-31 (bf16)")
        box(axes, 11.3, base + 0.45, 3.0, 1.15, COLOURS[second], "K rows 32-63 (bf16)")
        axes.text(12.8, base + 3.3, "stage s in shared memory", ha="center", fontsize=7.5)
        box(axes, 16.6, base + 1.75, 4.6, 1.15, COLOURS["work"], "warpgroup 0: Q Kᵀ, softmax")
        box(axes, 16.6, base + 0.35, 4.6, 1.15, COLOURS["work"], "warpgroups 1, 2: P V[:, :256], [:, 256:]")
        arrow(axes, (14.3, base + 1.7), (16.5, base + 2.3))
        arrow(axes, (14.3, base + 1.7), (16.5, base + 0.9), "k_full[s]")

    arrow(axes, (3.3, 5.6), (5.5, 6.5), "gather")
    arrow(axes, (3.3, 2.3), (5.5, 2.2), "gather")
    arrow(axes, (8.9, 6.7), (11.2, 7.1), "st.shared")
    arrow(axes, (8.9, 2.1), (11.2, 1.6), "st.shared")
    arrow(axes, (8.9, 6.2), (11.2, 3.1), "st.async", dashed=True)
    arrow(axes, (8.9, 2.6), (11.2, 5.6), "st.async", dashed=True)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def box(axes, x: float, y: float, width: float, height: float, colour: str, text: str) -> None:
    axes.add_patch(FancyBboxPatch((x, y), width, height, "round,pad=0.03", fc=colour, ec="white", lw=1.2))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=7.5,
              color="white" if colour == COLOURS["work"] else "black")


def arrow(axes, begin: tuple[float, float], end: tuple[float, float], text: str = "", dashed: bool = False) -> None:
    style = {"arrowstyle": "->", "color": "0.25", "linewidth": 1.1, "linestyle": "--" if dashed else "-"}
    axes.annotate("", end, begin, arrowprops=style)
    if text:
        middle = (0.65 * begin[0] + 0.35 * end[0], 0.65 * begin[1] + 0.35 * end[1])
        axes.annotate(text, middle, (0, 7), textcoords="offset points", fontsize=7, color="0.25", ha="center")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
