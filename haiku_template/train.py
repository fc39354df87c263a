"""Trains the model that a config file describes.

    python -m haiku_template.train --config=configs/digits.py --workdir=runs/digits

The same command resumes a stopped run. Keys of the config are changed after it:
--config.optimizer.learning_rate=3e-4. Exit codes: 0 done, 64 bad configuration or data,
69 device not available, 70 loss not finite, 71 replicas differ, 72 wrong bits, 74
storage, 75 SIGTERM, SIGHUP or SIGUSR1, 76 no progress, 77 memory full, 130 Ctrl-C: the
message says what was saved.
"""

import gc

if __name__ == "__main__":  # Before imports, which take a second.
    from haiku_template import signals

    gc.disable()  # What is imported stays.
    signals.install(signals.NOTHING_SAVED)

import os
from pathlib import Path
from typing import Any

from absl import flags

from haiku_template import cli, config, registry
from haiku_template.errors import ConfigError

FLAGS = cli.FLAGS
cli.define_config()
flags.DEFINE_string("workdir", None, "Directory of the run, new or resumed.")
flags.DEFINE_bool(
    "dry_run", False, "Print what the run needs of each device, and stop."
)
flags.DEFINE_bool(
    "check", False, "Overfit one batch, evaluate and save, all in 20 steps, and stop."
)
flags.DEFINE_string(
    "target",
    None,
    "With --dry_run, compile for GPUs that are not here: h100x8; several for a row of "
    "memory each, t4,l4,h100; list names them.",
)
flags.DEFINE_string(
    "device_memory_limit",
    None,
    "Limit for each device, such as 24GiB; by default JAX's.",
)
flags.DEFINE_flag(
    flags.Flag(
        flags.EnumParser(["true", "false", "apply"]),
        None,
        "fit",
        None,
        "Try what makes the run fit, and print the cheapest; =apply: the run takes it.",
        boolean=True,
    )
)
flags.DEFINE_string(
    "profile", None, "START:STOP: trace the steps after START, up to STOP, and sum up."
)
flags.DEFINE_string(
    "rewind",
    None,
    "Go back to before steps, and on without them: 812,815:820; auto: what ended it.",
)
flags.adopt_module_key_flags(cli)
NOWHERE = f"{os.devnull}/run"  # Of a dry run without a workdir: nothing is there.


def main() -> None:
    """Checks the config, chooses the devices, and trains."""
    target = FLAGS.target
    if target == "list":
        return cli.list_targets()
    cli.need("config", *["workdir"] * (not (FLAGS.check or FLAGS.dry_run)))
    if FLAGS.check or FLAGS.dry_run:
        _check_flags()
    config.check(FLAGS.config)
    _check_data_keys(FLAGS.config.data.to_dict())
    if "," in (target or ""):
        return _several_targets(target.split(","))
    if FLAGS.profile is not None and FLAGS.config.num_epochs is None:
        config.interval(FLAGS.profile, FLAGS.config.num_steps)
    if shares := FLAGS.config.exact_elastic:
        # Why: docs/decisions/training.md#threads
        os.environ.setdefault("PJRT_NPROC", str(shares))
    # From here on JAX is imported.
    devices = cli.device_manager() if target is None else cli.target_devices(target)
    from haiku_template.runs import start, trial

    gc.freeze()  # Why: docs/decisions/house.md#collector
    gc.enable()
    if FLAGS.check:
        return trial.check_run(FLAGS.config, devices)
    start.run(
        FLAGS.config,
        devices,
        FLAGS.workdir or NOWHERE,
        memory_limit=_memory_limit(),
        profile=FLAGS.profile,
        dry_run=FLAGS.dry_run,
        rewind=FLAGS.rewind,
        fit=None if FLAGS.fit == "false" else FLAGS.fit,
    )


def _check_flags() -> None:
    beside = {"dry_run": ("profile",)}
    beside["check"] = ("dry_run", "fit", "profile", "device_memory_limit")
    for flag in (name for name in beside if FLAGS[name].value):
        for other in (*beside[flag], "rewind"):
            if FLAGS[other].value not in (None, False, "false"):
                raise ConfigError(f"--{other} does nothing beside --{flag}")


def _memory_limit() -> int | None:
    from haiku_template.reporting.display import parse_bytes

    text = FLAGS.device_memory_limit
    return None if text is None else parse_bytes(text)


def _several_targets(names: list[str]) -> None:
    targets = {name: cli.target_devices(name) for name in names}
    from haiku_template.preflight import print_targets, settle
    from haiku_template.runs import start
    from haiku_template.training import Experiment

    limit, workdir, trainers = _memory_limit(), Path(FLAGS.workdir or NOWHERE), {}
    if FLAGS.fit not in (None, "false"):
        return start.fit_targets(FLAGS.config, targets, workdir, limit)
    for name, devices in targets.items():
        trainer = Experiment.from_config(FLAGS.config, devices).trainer(devices)
        trainers[name] = settle(trainer, workdir, limit)
    print_targets(trainers, limit)


def _check_data_keys(values: dict[str, Any]) -> None:
    """Checks the keys of a data set of ours; models import JAX, and users' code may."""
    from haiku_template.data import DATASETS, arguments

    if (name := values.pop("name")) in DATASETS:
        function = registry.resolve("data", name, DATASETS)
        registry.check_keys("data", name, function, arguments(values), None)


if __name__ == "__main__":
    cli.run(main)
