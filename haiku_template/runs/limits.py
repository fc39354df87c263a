"""Limits of a run in minutes, and of its evaluations in batches."""

import dataclasses
import functools
import signal
import threading
from collections.abc import Callable
from typing import Any

from haiku_template.errors import ConfigError, Interrupted, counted
from haiku_template.runs.stopping import LISTENING
from haiku_template.training import Experiment

POLL_SECONDS = 0.05


class FirstBatches:
    """The first batches of an evaluation set."""

    def __init__(self, dataset: Any, count: int) -> None:
        self._dataset = self.uncut = dataset
        self.num_batches = min(count, dataset.num_batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # While it is copied.
            raise AttributeError(name)
        return getattr(self._dataset, name)


def with_eval_batches(experiment: Experiment, count: int) -> Experiment:
    """Cuts the evaluation sets down to their first batches."""
    data = experiment.data
    if data.evaluation is None:
        raise ConfigError(
            f"config.eval_batches={count}, and the data set has nothing to evaluate on"
        )
    further = {k: FirstBatches(x, count) for k, x in data.evaluations.items()}
    first = FirstBatches(data.evaluation, count)
    data = data._replace(evaluation=first, evaluations=further)
    cut = dataclasses.replace(experiment, data=data)
    described = experiment.config and (experiment.config, cut)  # It is no edit.
    return dataclasses.replace(cut, described=described or None)


def within(minutes: float, train: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train`: after so many minutes of this start it ends, saved, as by SIGUSR1.

    The run notes it once it listens, whoever else handles signals, or ignores them.
    """
    passed, over = threading.Event(), threading.Event()

    def end(thread: int) -> None:
        over.wait(min(60 * minutes, threading.TIMEOUT_MAX))
        while not over.wait(POLL_SECONDS):
            if run := LISTENING.get(thread):
                passed.set()
                return run.note(signal.SIGUSR1)

    @functools.wraps(train)
    def limited(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        threading.Thread(target=end, args=(threading.get_ident(),), daemon=True).start()
        try:
            return train(trainer, *args, **kwargs)
        except Interrupted as error:
            # Each has a clock, and all stop at the step that the first one asks for.
            if not trainer.devices.processes.least(int(passed.is_set()) or None):
                raise
            passed_by = counted(f"{minutes:g}", "minutes")
            reason = f"after {passed_by}, as config.max_minutes says"
            print(f"stopped   {reason}: {str(error).partition('received: ')[2]}")
        finally:
            over.set()

    return limited
