"""How a cost grows: the slope of a straight line through its points on two logarithmic axes.

1 is a cost that is proportional to the size, 0 one that does not depend on it, 2 a quadratic one.
"""

import math
from collections.abc import Sequence

Point = tuple[float, float]
"""Size and cost, both above 0."""


def slope(points: Sequence[Point]) -> float:
    """The least-squares slope of log(cost) over log(size); two points of different size at least."""
    logs = [(math.log(size), math.log(cost)) for size, cost in points]
    middle_x = sum(x for x, _ in logs) / len(logs)
    middle_y = sum(y for _, y in logs) / len(logs)
    across = sum((x - middle_x) ** 2 for x, _ in logs)
    if not across:
        raise ValueError("a slope needs points of two sizes")
    return sum((x - middle_x) * (y - middle_y) for x, y in logs) / across


def steepest(points: Sequence[Point]) -> float:
    """The greater of the slope over all points and that of the last two.

    A fixed cost flattens the whole line and would hide a cost that only begins to grow too fast at the end.
    """
    ordered = sorted(points)
    return max(slope(ordered), slope(ordered[-2:]))
