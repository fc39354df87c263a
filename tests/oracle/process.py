"""One process of several: `haiku_template.train` of a saved config, perhaps stopped.

HALT, `STEP:INDEX:SIGNAL`, says by which signal the process of that number is stopped,
once its step is called; of `all` the launcher gets it, and passes it on.
"""

import os
import signal
import time
from pathlib import Path

from haiku_template import cli, config, signals
from haiku_template.runs import guards
from tests.cluster.faulty import train_with

HALTS = "a process is about to be stopped"  # As several.py reads it.
NOTICED = 2.5  # Seconds in which JAX, which looks once a second, sees a signal.


def get_config(path):
    """The config of a file: `--config=tests/oracle/process.py:PATH`."""
    return config.load(Path(path))


def halt(step, index, name):
    """Lets a process of the number get the signal once, in the call of the step."""
    number, note, halted = getattr(signal, name), guards.Guards.note, []

    def noted(self, steps, *args):
        if steps[-1] >= int(step) and not halted:
            halted.append(step)
            print(HALTS, flush=True)
            if index == str(cli.FLAGS.process_id):
                os.kill(os.getpid(), number)
            elif index == "all" and cli.FLAGS.process_id == 0:
                os.kill(os.getppid(), number)
            time.sleep(NOTICED)
        return note(self, steps, *args)

    guards.Guards.note = noted


def main():
    """Trains, with the stop of this process."""

    def change(devices):
        if words := os.environ.get("HALT"):
            halt(*words.split(":"))

    train_with(change)


if __name__ == "__main__":
    signals.install(signals.NOTHING_SAVED)
    cli.run(main)
