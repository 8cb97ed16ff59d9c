"""Golden vectors of the public recipes: what comes in, what must come out."""

from __future__ import annotations

import math
from typing import NamedTuple

FLOAT32_MAX = 3.4028234663852886e38
TINIEST = 1e-45  # the smallest float32


class Current(NamedTuple):
    """A scale from the amax of the very tensor."""

    format: str
    amax: float
    scale: float
    power_of_2: bool = False
    epsilon: float = 0.0


CURRENT = (
    Current("e4m3", 1, 448),
    Current("e4m3", 3, 149.33333),
    Current("e4m3", 448, 1),
    Current("e4m3", 0, 1),
    Current("e4m3", math.inf, 1),
    Current("e4m3", TINIEST, FLOAT32_MAX),
    Current("e4m3", 1, 256, power_of_2=True),
    Current("e4m3", 3, 128, power_of_2=True),
    Current("e4m3", 448, 1, power_of_2=True),
    Current("e4m3", 449, 0.5, power_of_2=True),
    Current("e4m3", TINIEST, 2.0**127, power_of_2=True),
    Current("e4m3", 0, 1, power_of_2=True),
    Current("e4m3", math.inf, 1, power_of_2=True),
    Current("e5m2", 1, 57344),
    Current("e5m2", 57344, 1),
    Current("e5m2", TINIEST, FLOAT32_MAX),
    Current("e5m2", 1, 32768, power_of_2=True),
    Current("e5m2", 3, 16384, power_of_2=True),
    Current("e5m2", 57344, 1, power_of_2=True),
    Current("e4m3", 0, 4.48e8, epsilon=1e-6),
    Current("e4m3", 0, 268435456, power_of_2=True, epsilon=1e-6),
    Current("e4m3", 1e-8, 447999.97, epsilon=1e-3),
    Current("e4m3", 3, 149.33333, epsilon=1e-3),
)

# (format, amax of a block of 32, the byte of its scale)
E8M0 = (
    ("e4m3", 0, 0),
    ("e4m3", 1e-40, 0),
    ("e4m3", 1, 119),
    ("e4m3", 3, 120),
    ("e4m3", 448, 127),
    ("e4m3", 449, 128),
    ("e4m3", 896, 128),
    ("e4m3", 3e38, 247),
    ("e4m3", math.inf, 254),
    ("e5m2", 1, 112),
    ("e5m2", 3, 113),
    ("e5m2", 448, 120),
    ("e5m2", 449, 121),
)


class Update(NamedTuple):
    """A run of scale updates of one column: amaxes in, scales out, and the history that is left."""

    format: str
    history: list[float]
    amaxes: list[float]
    scales: list[float]
    final: list[float] | None = None
    scale: float = 1.0
    algorithm: str = "max"
    margin: int = 0


MAX_OF_4 = [1.0, 2, 8, 4, 1, 1, 1, 1, 1]
UPDATES = (
    Update("e4m3", [0] * 4, MAX_OF_4, [448, 224, 56, 56, 56, 56, 112, 448, 448], [0, 1, 1, 1]),
    Update("e4m3", [0] * 4, MAX_OF_4[:4], [448, 224, 56, 56], [0, 2, 8, 4]),
    Update("e4m3", [0] * 4, MAX_OF_4[:5], [448, 224, 56, 112, 448], algorithm="most_recent"),
    Update("e4m3", [0] * 3, [2, 0, 0, 4], [224, 224, 224, 112], [0, 2, 4]),
    Update("e4m3", [0] * 4, [1, math.inf, 2, 2], [448, 448, 224, 224], [0, 1, 2, 2]),
    Update("e4m3", [0] * 4, [1, math.nan, 2, 2], [448, 448, 224, 224], [0, 1, 2, 2]),
    Update("e4m3", [0] * 4, [1, math.inf, 2], [448, 448, 224], algorithm="most_recent"),
    Update("e4m3", [0, math.nan, 4], [1], [112]),
    Update("e5m2", [0] * 4, [0.75], [19114.666], margin=2),
    Update("e4m3", [0], [448 / FLOAT32_MAX / 2], [FLOAT32_MAX], [0]),
    Update("e5m2", [0], [57344 / FLOAT32_MAX / 2], [FLOAT32_MAX], [0]),
    *(Update(name, [0], [amax], [1], [0]) for name in ("e4m3", "e5m2") for amax in (0, math.inf, math.nan)),
    Update("e4m3", [0], [3], [149.33333], [0]),
    Update("e5m2", [0], [3], [19114.666], [0]),
    # Constant tensors step + 0.25, 0.5 and 0.75 of a linear function's input, weight and gradient, margin 2.
    Update("e4m3", [0] * 8, [0.25, 1.25, 2.25, 3.25], [448, 89.6, 49.777779, 34.46154], margin=2),
    Update("e4m3", [0] * 8, [0.5, 1.5, 2.5, 3.5], [224, 74.666664, 44.8, 32], margin=2),
    Update("e5m2", [0] * 8, [0.75, 1.75, 2.75, 3.75], [19114.666, 8192, 5213.0908, 3822.9333], margin=2),
)

# (what comes in, the nearest value of four bits)
E2M1_TIES = (
    (0.25, 0),
    (0.26, 0.5),
    (0.75, 1),
    (1.25, 1),
    (1.75, 2),
    (2.5, 2),
    (2.51, 3),
    (3.5, 4),
    (5, 4),
    (5.01, 6),
    (6, 6),
    (7, 6),
)
