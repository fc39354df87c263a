"""`haiku_template.train` on slow and full disks: PATCH is code that makes them so."""

import os

from haiku_template import cli, signals, train


def main():
    device_manager = cli.device_manager

    def patched(*args):
        devices = device_manager(*args)
        exec(os.environ["PATCH"], {"index": devices.processes.index})
        return devices

    cli.device_manager = patched
    train.main()


if __name__ == "__main__":
    signals.install()
    cli.run(main)
