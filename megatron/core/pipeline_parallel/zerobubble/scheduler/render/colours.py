"""The colours of F, B, W and BW, stated once for the terminal, the SVG and the HTML page.

Chosen so that any two operations differ clearly (CIE76 difference above 19 between full shades)
with normal sight and with simulated deuteranopia and protanopia, and so that INK is readable on
every shade. The tests check both.
"""

from __future__ import annotations

from ..instruction import Op

INK = "#1b1f24"  # text
MUTED = "#57606a"  # axes, secondary text
IDLE = "#eef0f3"  # a rank's row where it computes nothing
PAPER = "#ffffff"
MARK = "#b3261e"  # where the reduction of a stage's gradients starts (AR)
CHECK = "#7a3fb0"  # where the last optimizer step is validated (PV)

MEANING: dict[Op, str] = {
    Op.F: "forward",
    Op.B: "backward for the input",
    Op.W: "backward for the weights",
    Op.BW: "both backwards at once",
    Op.AR: "gradient reduction starts",
    Op.PV: "the last optimizer step is validated",
}

# (first chunk of a rank, last chunk of a rank); the chunks between get shades between.
_SHADES: dict[Op, tuple[str, str]] = {
    Op.F: ("#5b8def", "#bcd2fa"),
    Op.B: ("#e8b33c", "#fbe3a2"),
    Op.W: ("#6fc795", "#cdf3db"),
    Op.BW: ("#cf76a6", "#f2c6dc"),
    Op.AR: (MARK, MARK),
    Op.PV: (CHECK, CHECK),
}


def rgb(colour: str) -> tuple[int, int, int]:
    """`#rrggbb` as three numbers from 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def shade(op: Op, chunk: int, num_chunks: int) -> str:
    """The colour of an operation: the first chunk in the full shade, later ones lighter."""
    full, light = (rgb(colour) for colour in _SHADES[op])
    share = chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    mixed = (round(a + (b - a) * share) for a, b in zip(full, light, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)
