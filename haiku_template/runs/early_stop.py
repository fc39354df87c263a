"""Early stopping."""

import math
from collections.abc import Callable
from typing import Any

from haiku_template.config import check_some
from haiku_template.errors import counted
from haiku_template.preflight.checks import check_measured


def early_stop(
    metric: str, patience: int, mode: str = "min", min_delta: float = 0.0
) -> Callable[[list[dict[str, Any]]], bool]:
    """Makes `train(stop_when=...)` for early stopping, which a resumed run remembers.

    It ends a run after `patience` evaluations without a value of `metric` (such as
    `eval/loss`) that is better than the best by more than `min_delta`; `mode` is `min`
    or `max`. Its attribute `reason` then says which was the best. Raises `ConfigError`
    for values out of their ranges.
    """
    options = {"mode": mode, "patience": patience, "min_delta": min_delta}
    check_some({f"early_stop.{key}": value for key, value in options.items()})

    # Why: docs/decisions/training.md#early-stopping
    def stops(rows: list[dict[str, Any]]) -> bool:
        names = dict.fromkeys(name for row in rows for name in row)
        kinds = (x for x in ("train/", "perf/") if metric.startswith(x))
        kind = next(kinds, "eval/")
        if all(any(name.startswith(x) for name in names) for x in ("eval/", kind)):
            check_measured("early_stop.metric", metric, names)
        sign, best = -1 if mode == "max" else 1, 0
        # A step counts once; None, which is no number, is no better than any.
        values = {row["step"]: row[metric] for row in rows if metric in row}
        if kind != "eval/":  # Lines are not evaluations: the last one before each.
            last, values = {}, {}
            for row in rows:
                if metric in row:
                    last = {row["step"]: row[metric]}
                if any(name.startswith("eval/") for name in row):
                    values |= last
        points = [(sign * math.inf if x is None else x, i) for i, x in values.items()]
        for i, (value, _) in enumerate(points):
            if sign * value < sign * points[best][0] - min_delta:
                best = i
        if not points or len(points) - 1 - best < patience:
            return False
        value, step = points[best]
        is_number = values[step] is not None  # Else none is.
        text = f"best at step {step}, {value:.6g}" if is_number else "never a number"
        stops.reason = (
            f"{metric} was {text}, and not better"
            + f" by more than {min_delta:g}" * (min_delta > 0)
            + f" in {counted(len(points) - 1 - best, 'evaluations')} since then "
            + f"(patience {patience})"
        )
        return True

    stops.metric = metric
    return stops
