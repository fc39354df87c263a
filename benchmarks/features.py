"""An epoch of a head alone, through its frozen trunk and from features, in one call.

    python -m benchmarks.features

Both train the last layer of `configs/digits_resnet.py`'s ResNet on the 1,437 digits, in
the whole loop, on one device, after 20 steps of all of it. An epoch is timed from the
end of the first step to that of the last; the start of a run that computes features,
and that of one that finds them, are timed apart. Rounds are interleaved; the ratio is
of the medians.
"""

import contextlib
import os
import statistics
import tempfile
import time

import jax

from configs import digits_resnet
from haiku_template.config import to_dict
from haiku_template.devices import DeviceManager
from haiku_template.runs import train
from haiku_template.runs.loop import Event
from haiku_template.runs.resume import with_features
from haiku_template.training import Experiment, Trainer

EXAMPLES, EPOCHS, ROUNDS = 1437, 4, 5


def epoch(trainer: Trainer, batch_size: int) -> float:
    """Seconds of an epoch of `training.train`."""
    num_steps, times = EPOCHS * EXAMPLES // batch_size, []

    def note(event: Event) -> None:
        if event.what == "step" and event.step in (1, num_steps):
            jax.block_until_ready(event.state)
            times.append(time.perf_counter())

    with (
        tempfile.TemporaryDirectory() as workdir,
        open(os.devnull, "w") as null,
        contextlib.redirect_stdout(null),
    ):
        train(trainer, num_steps=num_steps, workdir=workdir, hooks=[note])
    return (times[1] - times[0]) / (num_steps - 1) * EXAMPLES / batch_size


def main() -> None:
    """Prints seconds of epochs and of starts, and the ratio of the epochs."""
    devices = DeviceManager.create("auto", num_devices=1)
    names = ("through the trunk", "from features", "computing them", "finding them")
    found: dict[str, list[float]] = {name: [] for name in names}
    print(f"{devices.describe()}\n{EPOCHS} epochs, {ROUNDS} rounds, interleaved")
    with tempfile.TemporaryDirectory() as folder:
        config = digits_resnet.get_config()
        trainer = Experiment.from_config(config, devices).trainer(devices)
        options = {"num_steps": 20, "workdir": f"{folder}/whole"}
        train(trainer, config=to_dict(config), **options)
        config.init_from, config.finetuning.train = f"{folder}/whole", ("head/*",)
        through = Experiment.from_config(config, devices).trainer(devices)
        config.finetuning.features = "head"
        for number in range(ROUNDS):
            config.finetuning.features_dir = f"{folder}/{number}"
            trainer = Experiment.from_config(config, devices).trainer(devices)
            for name in names[2:]:
                begun = time.perf_counter()
                cut = with_features(trainer)
                found[name].append(time.perf_counter() - begun)
            found[names[0]].append(epoch(through, config.batch_size))
            found[names[1]].append(epoch(cut, config.batch_size))
    for name, values in found.items():
        middle = statistics.median(values)
        print(f"{name:>17} {middle:8.4f} s ({min(values):.4f}-{max(values):.4f})")
    ratio = statistics.median(found[names[0]]) / statistics.median(found[names[1]])
    print(f"an epoch from features is {ratio:.0f} times as fast as through the trunk")


if __name__ == "__main__":
    main()
