"""Early stopping."""

from collections.abc import Callable
from typing import Any

from haiku_template.preflight.checks import check_measured


def early_stop(
    metric: str, patience: int, mode: str = "min"
) -> Callable[[list[dict[str, Any]]], bool]:
    """Makes `train(stop_when=...)` for early stopping, which a resumed run remembers.

    It ends a run after `patience` evaluations without a better value of `metric` (such
    as `eval/loss`); `mode` is `min` or `max`.
    """

    # Why: docs/decisions/training.md#early-stopping
    def stops(rows: list[dict[str, Any]]) -> bool:
        names = dict.fromkeys(name for row in rows for name in row)
        if any(name.startswith("eval/") for name in names):
            check_measured("early_stop.metric", metric, names)
        values = [row[metric] for row in rows if row.get(metric) is not None]
        if not values:
            return False
        best = values.index((min if mode == "min" else max)(values))
        return len(values) - 1 - best >= patience

    stops.metric = metric
    return stops
