"""Lists and verifies the checkpoints of a run.

    python -m haiku_template.checkpoints --workdir=runs/digits [--repair]

Reads each to the host, one part of the state after another, and compares its bits with
the digests that were saved with it. --repair renames those that are damaged to
STEP.damaged; the run, started again, goes on from the newest of the others.

Exit codes: 0 none is damaged, or those that were are renamed, 64 bad flags, no
checkpoints, or with --repair a run that is alive, 74 one is damaged.
"""

if __name__ == "__main__":  # Before imports, which take a second.
    from haiku_template import signals

    signals.install()

import os
from pathlib import Path

from absl import flags

from haiku_template import cli
from haiku_template.errors import ConfigError, StorageError

FLAGS = cli.FLAGS
flags.DEFINE_string("workdir", None, "The directory of the run.", required=True)
flags.DEFINE_bool("repair", False, "Rename those that are damaged.")


def main() -> None:
    """Prints a line for each checkpoint; raises `StorageError` if one is damaged."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # No device is needed.
    from haiku_template.storage import Checkpoints, workdir

    folder = Path(FLAGS.workdir)
    workdir.check_path(folder)
    if FLAGS.repair and workdir.is_locked(folder):
        raise ConfigError(f"a run is writing to {folder}; stop it before --repair")
    if not workdir.saved_steps(folder / workdir.CHECKPOINTS):
        raise ConfigError(f"{folder} holds no checkpoints")
    run, damages = workdir.run_id(folder), 0
    with Checkpoints(folder / workdir.CHECKPOINTS, run=run) as checkpoints:
        for step, metrics in checkpoints.metrics.items():
            try:
                has_digests = checkpoints.verify(step)
                sentence = "verified" if has_digests else "readable, without digests"
            except StorageError as error:
                if step not in checkpoints.steps:  # A live run took it away.
                    continue
                damages += 1
                sentence = str(error)
                if FLAGS.repair:
                    sentence += f"; it is called {checkpoints.set_aside(step)} now"
            values = (f"{name} {value:.4g}" for name, value in metrics.items())
            print("  ".join([f"step {step:>8}", *values, sentence]), flush=True)
    if damages and not FLAGS.repair:
        raise StorageError(
            f"{damages} of {len(checkpoints.steps)} checkpoints cannot be used; a run "
            "that resumes passes them by, and --repair renames them"
        )


if __name__ == "__main__":
    cli.run(main)
