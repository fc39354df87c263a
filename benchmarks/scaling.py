"""What data-parallel training gains with more GPUs: computed, and not measured.

    python -m benchmarks.scaling --parameters=124.4e6 --step_seconds=0.134

Prints a table for nodes of eight H100s and two networks between them. The step's
seconds are those of one GPU, which sends nothing: 1 / `perf/steps_per_second` of a run
on one card. The formula and what it assumes: docs/scaling.md.
"""

import argparse
import math
from typing import NamedTuple

NODE = 8  # GPUs.
# Bytes a second, in each direction, as data sheets have them: of a GPU's NVLink 4, and
# of all network cards of a node. One card of 400 Gb/s for each GPU; one of 25 for all.
NVLINK = 450e9
NETWORKS = {"NDR InfiniBand": NODE * 400e9 / 8, "25 GbE": 25e9 / 8}
REACHED = 0.8  # Share of these that bytes of arrays get.
# Seconds before the first byte, and for a hop by NVLink and by network: those by which
# NCCL chooses its algorithm (src/graph/tuning.cc; ring Simple, and tree LL128).
RING = (8.4e-6, 3.4e-6, 14e-6)
TREE = (14e-6, 1.25e-6, 8.5e-6)
TREE_REACHED = 0.92 * 120 / 128  # Of a ring's bandwidth, flags among its bytes.
BACKWARD = 2 / 3  # Share of a step, during which gradients can travel.


class Gradients(NamedTuple):
    """Gradients of a step."""

    size: float  # Bytes, all told.
    all_reduces: int = 1  # One after another, of as many bytes each.


def bus_bandwidth(gpus: int, network: float) -> float:
    """Bytes a second that each GPU can pass on, while all of them do."""
    return REACHED * (NVLINK if gpus <= NODE else min(NVLINK, network))


def all_reduce_seconds(gpus: int, gradients: Gradients, network: float) -> float:
    """Seconds of a step's all-reduces: by rings or trees, whichever NCCL would take."""
    if gpus == 1:
        return 0.0
    bandwidth, nodes = bus_bandwidth(gpus, network), math.ceil(gpus / NODE)
    size = gradients.size / gradients.all_reduces
    hops, across = 2 * (gpus - 1), 2 * nodes * (nodes > 1)
    ring = RING[0] + (hops - across) * RING[1] + across * RING[2]
    ring += 2 * (gpus - 1) / gpus * size / bandwidth
    tree = 2 * ((min(gpus, NODE) - 1) * TREE[1] + math.log2(nodes) * TREE[2])
    tree += TREE[0] + 2 * size / (TREE_REACHED * bandwidth)
    return gradients.all_reduces * min(ring, tree)


def efficiencies(step: float, sent: float, accumulate: int = 1) -> tuple[float, float]:
    """Shares of the ideal speed: without overlap, and with all that there can be.

    Gradients can travel beside the backward pass of the last micro-batch alone.
    """
    hidden = min(sent, BACKWARD * step / accumulate)
    return step / (step + sent), step / (step + sent - hidden)


def table(
    parameters: float, step: float, accumulate: int = 1, all_reduces: int = 1
) -> list[str]:
    """Makes the table's lines, in Markdown."""
    lines = [
        "| GPUs | between nodes | float32: ms | speed, % | bfloat16: ms | speed, % |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    rows = [(gpus, "", NVLINK) for gpus in (2, 8)]
    for name, network in NETWORKS.items():
        rows += [(gpus, name, network) for gpus in (16, 64, 256, 1024)]
    for gpus, name, network in rows:
        cells = []
        for width in (4, 2):
            count = math.ceil(all_reduces * width / 4)
            gradients = Gradients(width * parameters, count)
            sent = all_reduce_seconds(gpus, gradients, network)
            shares = efficiencies(step, sent, accumulate)
            cells += [f"{1e3 * sent:.1f}", "-".join(f"{100 * x:.0f}" for x in shares)]
        lines.append(f"| {gpus:,} | {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Parses the arguments and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--parameters", type=float, required=True, help="trainable ones")
    add("--step_seconds", type=float, required=True, help="of a step on one GPU")
    add("--accumulate_steps", type=int, default=1, help="micro-batches in it")
    add("--all_reduces", type=int, default=1, help="in float32, as --target counts")
    given = parser.parse_args()
    sizes = given.accumulate_steps, given.all_reduces
    print("\n".join(table(given.parameters, given.step_seconds, *sizes)))


if __name__ == "__main__":
    main()
