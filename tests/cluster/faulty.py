"""`haiku_template.train`, in which one process has a fault at a moment.

FAULTS, `INDEX:MOMENT:FAULT` with a comma between several, says which. A moment is a
function of the template's that all runs call, and its fault comes before the second
call; of those that are called once before the first.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from haiku_template import cli, signals, train

# Functions by moment: module, class and name.
MOMENTS = {
    "compile": ("training.trainer", "Trainer", "compile"),
    "data": ("data.dataset", "ArrayDataset", "row_block"),  # Of a stack of batches.
    "step": ("runs.guards", "Guards", "note"),
    "save": ("storage.checkpoint", "Checkpoints", "save"),
    "evaluation": ("training.trainer", "Trainer", "evaluate"),
    "writer": ("reporting.report", "Report", "training"),
    "end": ("reporting.report", "Report", "finish"),
}
ONCE = ("compile", "data", "end", "import")


def fault(name: str) -> None:
    """A signal to this process, seconds of sleep, a wrong clock, or a statement."""
    if name.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, name))
    elif name.isdecimal():
        time.sleep(int(name))
    elif name == "clock":
        now = time.time
        time.time = lambda: now() + 7 * 86_400
    else:
        exec(name)


class OfJax:
    """Finder with a fault when jax is imported, which all do once they have met."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, module: str, *_: object) -> None:
        """Finds nothing."""
        if module == "jax":
            sys.meta_path.remove(self)
            fault(self.name)


def patch(moment: str, name: str) -> None:
    """Replaces the moment's function by one with the fault."""
    import importlib

    module, owner, attribute = MOMENTS[moment]
    owner = getattr(importlib.import_module(f"haiku_template.{module}"), owner)
    original, calls = getattr(owner, attribute), []

    def faulty(*args: object, **kwargs: object) -> object:
        calls.append(moment)
        if len(calls) == (1 if moment in ONCE else 2):
            fault(name)
        return original(*args, **kwargs)

    setattr(owner, attribute, faulty)


def main() -> None:
    """Trains with the faults of this process."""
    texts = [text.split(":", 2) for text in os.environ["FAULTS"].split(",")]
    own = [x[1:] for x in texts if cli.FLAGS.process_id == int(x[0])]
    for moment, name in own:
        if moment == "import":
            sys.meta_path.insert(0, OfJax(name))

    def patch_all(devices: object) -> None:
        for moment, name in own:
            if moment != "import":
                patch(moment, name)

    train_with(patch_all)


def train_with(change: Callable[[Any], None]) -> None:
    """Trains once `change` has seen the devices: JAX is imported by then."""
    joined = cli.device_manager

    def device_manager(*args: object) -> object:
        devices = joined(*args)
        change(devices)
        return devices

    cli.device_manager = device_manager
    train.main()


if __name__ == "__main__":
    signals.install(signals.NOTHING_SAVED)
    cli.run(main)
