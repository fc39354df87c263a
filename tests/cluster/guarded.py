"""`haiku_template.train` under JAX's thread guard.

With it a computation of several processes that a second thread starts is an error: in
each process such threads may start theirs in another order. The environment variable
JAX_THREAD_GUARD alone does nothing: the guard belongs to the thread that sets it.
"""

import jax

from haiku_template import cli, train

if __name__ == "__main__":
    with jax.thread_guard(True):
        cli.stop_on_sigterm()
        cli.run(train.main)
