"""Search of hyper-parameters by Optuna, an extra: `haiku_template[search]`."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, NonFiniteError
from haiku_template.runs import start
from haiku_template.runs.comparison import summarize_run
from haiku_template.runs.early_stop import early_stop


def objective(
    suggest: Callable[[Any], Any], devices: DeviceManager, folder: str | Path
) -> Callable[[Any], float]:
    """Makes a function of a trial for `study.optimize`: it trains, in `folder/NUMBER`.

    `suggest(trial)` makes the config. The value is the best of `config.best_metric`,
    and the study's direction must be `config.best_mode`'s. Each evaluation is reported,
    so that a pruner may end a run, saved. A run that is not finite is pruned, and so is
    one that ended before num_steps, as by `max_minutes`, but not by `early_stop`.
    """
    import optuna

    def run(trial: Any) -> float:
        config, workdir = suggest(trial), Path(folder) / str(trial.number)
        if not hasattr(config, "best_mode"):
            raise ConfigError(f"suggest(trial) returns {config!r:.40}, and no config")
        if config.mirror:  # Of one run.
            config.mirror = str(Path(config.mirror, str(trial.number)))
        direction = {"min": "MINIMIZE", "max": "MAXIMIZE"}[config.best_mode]
        if trial.study.direction.name != direction:
            raise ConfigError(
                f"the study is to {trial.study.direction.name.lower()}, and "
                f"config.best_mode={config.best_mode!r}, of {config.best_metric}; "
                f"optuna.create_study(direction={direction.lower()!r})"
            )
        reported, stops = set(), lambda rows: False
        if config.early_stop.patience is not None:
            stops = early_stop(**config.early_stop)

        def report(rows: list[dict[str, Any]]) -> None:
            for row in rows:
                value, step = row.get(config.best_metric), row["step"]
                if value is not None and step not in reported:
                    reported.add(step)
                    trial.report(value, step)

        def prunes(rows: list[dict[str, Any]]) -> bool:
            report(rows)
            if stops(rows):
                prunes.reason = stops.reason
                return True
            prunes.reason = "as Optuna's pruner says"
            return trial.should_prune()

        try:
            start.run(config, devices, str(workdir), stop_when=prunes)
        except NonFiniteError as error:
            raise optuna.TrialPruned(str(error)) from error
        finally:
            gc.collect()  # A state in cycles of references would stay on its devices.
        summary = summarize_run(workdir)
        report(summary.rows)  # The last evaluation, and those before a resume.
        if trial.should_prune() or summary.state.startswith("stopped at"):
            raise optuna.TrialPruned(summary.state)
        if summary.best is None:
            raise ConfigError(f"{workdir} has no values of {config.best_metric}")
        return summary.best[0]

    return run
