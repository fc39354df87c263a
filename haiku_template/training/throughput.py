"""What a run gets done: tokens, and a model's arithmetic next to what is possible."""

from typing import NamedTuple


class Work(NamedTuple):
    """What one example of a training batch amounts to.

    Attributes:
      tokens: that are learned from; 0 where examples have none.
      flops: floating-point operations of its forward and backward pass, by the
        model's formula; 0 where there is none.
    """

    tokens: int = 0
    flops: float = 0.0


UNKNOWN = Work()


def rates(
    work: Work, examples_per_second: float, peak: float | None
) -> dict[str, float]:
    """Metrics of a run's speed.

    Args:
      work: of one example.
      examples_per_second: over all devices.
      peak: FLOP/s of matrix products on all devices, as measured; None if not.
    """
    metrics = {"perf/examples_per_second": examples_per_second}
    if work.tokens:
        metrics["perf/tokens_per_second"] = examples_per_second * work.tokens
    if work.flops:
        metrics["perf/model_flops_per_second"] = examples_per_second * work.flops
        if peak:
            metrics["perf/utilisation"] = examples_per_second * work.flops / peak
    return metrics


def speed_text(metrics: dict[str, float]) -> str:
    """`1,234 tokens/s`, or `1,234 examples/s`."""
    unit = "tokens" if "perf/tokens_per_second" in metrics else "examples"
    return f"{metrics[f'perf/{unit}_per_second']:,.0f} {unit}/s"


def rate_text(metrics: dict[str, float]) -> str:
    """The same, and what is known of it: `1,234 tokens/s (31% of matmul peak)`."""
    text = speed_text(metrics)
    share = metrics.get("perf/utilisation")
    return text if share is None else f"{text} ({share:.0%} of matmul peak)"
