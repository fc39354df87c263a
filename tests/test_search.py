"""Search of hyper-parameters by Optuna, its real package: `make test-trackers`."""

import json

import pytest

from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from tests.test_predict import config_of

pytestmark = pytest.mark.trackers
CPU = DeviceManager.create("cpu", num_devices=1)


@pytest.fixture
def suggest(tmp_path):
    base = config_of(tmp_path)
    base.num_steps, base.eval_every = 6, 2
    base.mirror = str(tmp_path / "mirror")

    def suggest(trial):
        config = base.copy_and_resolve_references()
        rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
        config.optimizer.learning_rate = rate
        return config

    return suggest


def test_a_study_trains_runs_and_finds_the_best_of_them(suggest, tmp_path):
    import optuna

    from haiku_template.runs.search import objective

    study = optuna.create_study(direction="minimize")
    for rate in (1e-4, 1e-2):
        study.enqueue_trial({"rate": rate})
    study.optimize(objective(suggest, CPU, tmp_path / "search"), n_trials=2)
    for trial in study.trials:
        folder = tmp_path / "search" / str(trial.number)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        losses = {x["step"]: x["eval/loss"] for x in rows if "eval/loss" in x}
        assert list(losses) == [2, 4, 6]
        assert (tmp_path / "mirror" / str(trial.number) / "run.json").is_file()
        assert trial.value == min(losses.values())
        assert trial.intermediate_values == losses
    assert study.best_params["rate"] == 1e-2


def test_a_pruned_run_is_saved_where_it_ended(suggest, tmp_path, capsys):
    import optuna

    from haiku_template.runs.search import objective

    pruner = optuna.pruners.ThresholdPruner(upper=0.0)
    study = optuna.create_study(direction="minimize", pruner=pruner)
    study.optimize(objective(suggest, CPU, tmp_path / "search"), n_trials=1)
    assert study.trials[0].state == optuna.trial.TrialState.PRUNED
    steps = (tmp_path / "search" / "0" / "checkpoints").iterdir()
    assert [x.name for x in steps if x.name.isdecimal()] == ["2"]
    assert "early: as Optuna's pruner says" in capsys.readouterr().out


def test_what_is_known_at_the_end_alone_is_reported_too(suggest, tmp_path):
    import optuna

    from haiku_template.runs.search import objective

    def at_the_end(trial):
        config = suggest(trial)
        config.eval_every = None
        return config

    pruner = optuna.pruners.ThresholdPruner(upper=0.0)
    study = optuna.create_study(direction="minimize", pruner=pruner)
    study.optimize(objective(at_the_end, CPU, tmp_path / "search"), n_trials=1)
    assert [*study.trials[0].intermediate_values] == [6]
    assert study.trials[0].state == optuna.trial.TrialState.PRUNED


def test_a_run_that_had_no_time_is_no_value_of_the_search(suggest, tmp_path):
    import optuna

    from haiku_template.runs.search import objective

    def short(trial):
        config = suggest(trial)
        config.num_steps, config.max_minutes = 10_000_000, 0.05
        return config

    study = optuna.create_study(direction="minimize")
    study.optimize(objective(short, CPU, tmp_path / "search"), n_trials=1)
    assert study.trials[0].state == optuna.trial.TrialState.PRUNED
    saved = (tmp_path / "search" / "0" / "checkpoints").iterdir()
    assert any(path.name.isdecimal() for path in saved)


def test_no_state_of_a_trial_stays_on_its_devices(suggest, tmp_path):
    import gc

    import jax
    import optuna

    from haiku_template.runs.search import objective

    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    study = optuna.create_study(direction="minimize")
    gc.disable()  # What is collected is the objective's own doing.
    try:
        study.optimize(objective(suggest, CPU, tmp_path / "search"), n_trials=2)
        assert sum(x.nbytes for x in jax.live_arrays()) <= before + 1000
    finally:
        gc.enable()


@pytest.mark.parametrize("result", [None, {"num_steps": 3}])
def test_a_function_that_makes_no_config_is_refused(tmp_path, result):
    import optuna

    from haiku_template.runs.search import objective

    study = optuna.create_study(direction="minimize")
    with pytest.raises(ConfigError, match="suggest.*returns .*, and no config"):
        study.optimize(objective(lambda _: result, CPU, tmp_path), n_trials=1)


def test_a_study_of_the_other_direction_is_refused(suggest, tmp_path):
    import optuna

    from haiku_template.runs.search import objective

    study = optuna.create_study(direction="maximize")
    with pytest.raises(ConfigError, match="create_study\\(direction='minimize'\\)"):
        study.optimize(objective(suggest, CPU, tmp_path), n_trials=1)
