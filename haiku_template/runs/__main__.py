"""Compares the runs below a folder: keys that differ, best metrics, states, curves.

    python -m haiku_template.runs runs [--metric=eval/accuracy --mode=max] [--csv]

Draws comparison.png in the folder; `--csv` prints comma-separated values and draws
nothing. Exit codes: 0 done, 64 no runs or a damaged config.
"""

from pathlib import Path

from absl import flags

from haiku_template import cli
from haiku_template.errors import ConfigError

FLAGS = cli.FLAGS
flags.DEFINE_string("metric", None, "To compare by; by default each run's best_metric.")
flags.DEFINE_enum("mode", None, ["min", "max"], "Of --metric, which value is best.")
flags.DEFINE_bool("csv", False, "Print comma-separated values, and draw nothing.")


def main(folders: list[str]) -> None:
    """Prints a table of the runs and draws their curves."""
    if len(folders) != 1:
        raise ConfigError(
            "name one folder of runs: python -m haiku_template.runs FOLDER"
        )
    if FLAGS.metric is not None and FLAGS.mode is None:
        raise ConfigError(f"--metric={FLAGS.metric} needs --mode=min or --mode=max")
    from haiku_template.preflight.checks import check_measured
    from haiku_template.runs import comparison

    folder = Path(folders[0])
    runs = comparison.summarize_runs(folder, FLAGS.metric, FLAGS.mode)
    if FLAGS.metric and not any(run.best for run in runs):
        names = dict.fromkeys(name for run in runs for row in run.rows for name in row)
        check_measured("--metric", FLAGS.metric, names)
    if FLAGS.csv:
        return print(comparison.as_csv(runs), end="")
    comparison.show(folder, runs)


if __name__ == "__main__":
    cli.run(main, arguments=True)
