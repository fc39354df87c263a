"""Data sets that worker processes make, for `test_workers.py`."""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from absl import flags

from haiku_template.data import (
    Data,
    EvaluationSet,
    Split,
    bucketed,
    from_iterator,
    from_split,
)
from haiku_template.data.images import crop_and_flip
from haiku_template.errors import ConfigError

RUN = os.environ.setdefault("PROCESS_OF_THE_RUN", str(os.getpid()))


flags.DEFINE_integer("noise_of_worker_sets", 3, "Of a published data set.")


class OddError(Exception):
    """An error that cannot be made again of its message alone."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Steps:
    """Batches of the number of the step, and what happens in a worker before them."""

    def __init__(self, happens=lambda step: None, size=3):
        self.happens, self.size = happens, size

    def batch(self, step):
        if str(os.getpid()) != RUN:
            self.happens(step)
        return {"inputs": np.full((4, self.size), step, np.float32)}


def steps():
    return Data(Steps(), EvaluationSet(np.arange(40.0), None, 4))


class Noisy:
    def batch(self, step):
        return {"inputs": np.full(4, step * flags.FLAGS.noise_of_worker_sets)}


def noisy():
    return Data(Noisy(), None)


def at(function, *args):
    """Makes data of what happens at a step in a worker."""
    return Data(Steps(lambda step: function(step, *args)), None)


def images(spec):
    rng = np.random.default_rng(0)
    pictures = rng.integers(256, size=(50, 8, 8, 3), dtype=np.uint8)
    labels = rng.integers(3, size=50).astype(np.int32)
    split = Split(pictures[:37], labels[:37], pictures[37:], labels[37:])
    return from_split(split, spec, num_classes=3, augment=crop_and_flip)


def lengths(spec):
    rng = np.random.default_rng(0)
    texts = [{"tokens": np.arange(n)} for n in rng.integers(1, 17, size=64)]
    return bucketed(texts, spec, (4, 8, 16), mask="mask")


class Kinds:
    def batch(self, step):
        rng = np.random.default_rng(step)
        x = rng.normal(size=(6, 4, 2))
        return {
            "fortran": np.asfortranarray(x[..., 0]),
            "strided": x.transpose(0, 2, 1)[:, ::-1],
            "bfloat16": x.astype(ml_dtypes.bfloat16),
            "records": np.zeros(6, [("a", "i4"), ("b", "f8")]),
            "empty": np.zeros((6, 0)),
            "text": np.array(["a", "bcd"] * 3),
            "nested": [(x > 0, None), {"bytes": x.astype(np.int8)}],
        }


def kinds():
    return Data(Kinds(), None)


def raises(step):
    if step == 5:
        raise ZeroDivisionError("no such picture")


def refuses(step):
    if step == 5:
        raise ConfigError("picture 5 is no picture; remove it")


def raises_oddly(step):
    if step == 5:
        raise OddError("this", "that")


def dies_once(step, folder, number):
    """Ends by a signal, or with an exit code, the first time that step 6 is made."""
    died = Path(folder) / "died"
    if step == 6 and not died.exists():
        died.touch()
        os.kill(os.getpid(), number) if number else os._exit(3)


def dies_each_time(step, folder):
    """Ends by a signal the first time that each step is made, but for the first one."""
    died = Path(folder) / str(step)
    if step > 1 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def dies(step):
    if step == 6:
        os.kill(os.getpid(), signal.SIGKILL)


def hangs(step):
    if step > 2:
        time.sleep(600)


def is_slow(step):
    if step == 5:
        time.sleep(1.5)


def is_short_of_memory():
    """Makes data of which no batch fits in the files that a worker may write."""

    def limit(step):
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    return Data(Steps(limit, size=10_000), None)


class OfTheProcess:
    def batch(self, step):
        return {"inputs": np.full((4, 3), os.getpid())}


def of_the_process():
    return Data(OfTheProcess(), None)


def without_jax(step):
    assert "jax" not in sys.modules


def fails_in_a_worker():
    if str(os.getpid()) != RUN:
        raise FileNotFoundError("there are no pictures here")
    return steps()


def forward_only():
    return Data(from_iterator(lambda: [{"inputs": np.ones((4, 2))}]), None)
