"""Compares a model with a publisher's function before training: first loss or outputs.

    python -m haiku_template.verify --config=mine.py --against=mine:published

`published(params, net_state, batch)` gets the parameters that training would start from
and its first batch, as NumPy arrays, and returns the loss of the batch, one number, or
outputs as the model's. The model computes as in evaluation. With --workdir instead of
--config the parameters are those of a run's checkpoint.

Exit codes: 0 alike, 64 they differ, or bad configuration or data, 69 device not
available, 74 checkpoint storage.
"""

if __name__ == "__main__":  # Before imports, which take a second.
    from haiku_template import signals

    signals.install()

from absl import flags

from haiku_template import cli, config, registry
from haiku_template.errors import ConfigError

FLAGS = cli.FLAGS
cli.define_config()
flags.DEFINE_string(
    "against",
    None,
    "MODULE:FUNCTION to compare with, of (params, net_state, batch).",
    required=True,
)
flags.DEFINE_float(
    "tolerance",
    1e-5,
    "Difference allowed, as a share of a leaf's largest value.",
    lower_bound=0.0,
)
cli.run_flags(required=False)
flags.adopt_module_key_flags(cli)


def main() -> None:
    """Makes the model, or opens the run, and prints each comparison."""
    if (FLAGS.config is None) == (FLAGS.workdir is None):
        raise ConfigError("possible is either --config or --workdir")
    if FLAGS.config is None:
        run = cli.open_run()
        trainer = run.trainer
    else:
        for name in ("checkpoint", "experiment", "trust"):
            if FLAGS[name].present:
                raise ConfigError(f"--{name} does nothing beside --config")
        config.check(FLAGS.config)
        devices = cli.device_manager()
        from haiku_template.training import Experiment

        trainer = Experiment.from_config(FLAGS.config, devices).trainer(devices)
    function = registry.resolve("--against", FLAGS.against, {})
    what = f"--against={FLAGS.against!r}"
    registry.check_takes(what, function, "params", "net_state", "batch")
    from haiku_template.runs import verify

    state = trainer.init() if FLAGS.config else run.state
    for comparison in verify(trainer, state, function, FLAGS.tolerance):
        print(comparison)


if __name__ == "__main__":
    cli.run(main)
