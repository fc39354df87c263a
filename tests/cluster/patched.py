"""`haiku_template.train` on slow and full disks: PATCH is code that makes them so."""

import os

from haiku_template import cli, signals
from tests.cluster.faulty import train_with


def main():
    def change(devices):
        exec(os.environ["PATCH"], {"index": devices.processes.index})

    train_with(change)


if __name__ == "__main__":
    signals.install(signals.NOTHING_SAVED)
    cli.run(main)
