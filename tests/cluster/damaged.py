"""Damages checkpoints that two processes wrote together, and restores them in both.

    python -m tests.cluster.damaged ADDRESS INDEX FOLDER BITS SMALL EVERY

Process 0 prints the counts of `tests/storage/test_damages.py` as JSON, and what went
wrong. Also for the reading of one process alone, which the same files are for.
"""

import json
import shutil
import sys
from pathlib import Path

import jax

from haiku_template import cluster
from haiku_template.devices import DeviceManager, Layout
from haiku_template.devices.processes import gather
from haiku_template.storage.checkpoint import Checkpoints, newest_whole
from tests.storage import test_damages as damages
from tests.storage.test_verified import bits


def shares(state):
    """Bits of what this process has of each leaf."""
    parts = [[s.data for s in x.addressable_shards] for x in jax.tree.leaves(state)]
    return [bits(part) for part in parts]


def main(folder: Path, num_bits: int, num_small: int, every: int) -> None:
    """Saves two runs, and tries each damage of the table in both processes."""
    devices = DeviceManager.create("cpu", simulate_devices=2)
    processes, layout = devices.processes, Layout(devices.devices, (("*", "data"),))
    whole, copy = folder / "whole", folder / "copy"

    def place(state):
        return devices.init(lambda: state, layout=layout)

    damages.save_runs(whole, place)
    processes.first(None)
    abstract = devices.abstract(lambda: damages.state_of("a", 2), layout=layout)
    expected = {s: shares(place(damages.state_of("a", s))) for s in damages.STEPS}
    counts, wrong = dict.fromkeys(damages.STEPS, 0), []
    if processes.index == 0:
        shutil.copytree(whole, copy)
        total = len([*damages.table(copy, num_bits, num_small)])
    for number in range(0, processes.first(total if not processes.index else 0), every):
        name = ""
        if processes.index == 0:
            shutil.rmtree(copy)
            shutil.copytree(whole, copy)
            name = damages.damage(copy, num_bits, num_small, number)
        processes.first(None)
        result, error = None, None
        try:
            with Checkpoints(copy / "a", run="a", cleanup=True) as checkpoints:
                steps = processes.first(checkpoints.steps)
                (result, _), state, _ = newest_whole(
                    [(step, 0) for step in steps],
                    lambda place, c=checkpoints: c.restore(place[0], abstract),
                    lambda damage: next(filter(None, gather(damage)), None),
                )
            if shares(state) != expected[result]:
                error = f"other bits than those of step {result}"
        except Exception as raised:
            error = repr(raised)[:300]
        outcomes = gather((result, error))
        if outcomes[0] != outcomes[1] or error:
            wrong.append((name, outcomes))
        else:
            counts[result] += 1
    if processes.index == 0:
        print(json.dumps({"counts": list(counts.values()), "wrong": wrong}))


if __name__ == "__main__":
    address, index, path, *numbers = sys.argv[1:]
    cluster.join(address, 2, int(index))
    main(Path(path), *map(int, numbers))
