"""`haiku_template.train` under JAX's thread guard.

With it a computation of several processes that a second thread starts is an error: in
each process such threads may start theirs in another order. The environment variable
JAX_THREAD_GUARD alone does nothing: the guard belongs to the thread that sets it.
After SIGUSR1 its data hang, as those of a network's file system may.
"""

import signal
import time

import jax

from haiku_template import cli, signals, train
from haiku_template.data.dataset import ArrayDataset


def hang(*_: object) -> None:
    """Makes all reads from now on hang."""
    ArrayDataset.rows = ArrayDataset.row_block = lambda *_: time.sleep(10_000)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, hang)
    with jax.thread_guard(True):
        signals.install(signals.NOTHING_SAVED)
        cli.run(train.main)
