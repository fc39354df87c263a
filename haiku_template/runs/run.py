"""A finished run as one value: its config, its trainer, one of its checkpoints."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import haiku as hk
import jax
import numpy as np
from ml_collections import ConfigDict

from haiku_template import compat
from haiku_template.bounded import is_file
from haiku_template.config import of_run
from haiku_template.devices import DeviceManager
from haiku_template.devices.collectives import with_axis
from haiku_template.errors import ConfigError
from haiku_template.finetuning import (
    ADAPTERS,
    Plan,
    check_same_frozen,
    is_lost,
    read_facts,
    without_source,
)
from haiku_template.models import Family, plain_outputs
from haiku_template.models.attention import for_devices
from haiku_template.models.forms import with_state
from haiku_template.models.precision import Precision
from haiku_template.preflight import fingerprint
from haiku_template.reporting import plots
from haiku_template.storage.checkpoint import restore
from haiku_template.training import Experiment, Trainer
from haiku_template.training.experiment import check_code, family_of
from haiku_template.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Run:  # Why: docs/decisions/house.md#run
    """One checkpoint of a run, on any devices; each part is read when asked for."""

    workdir: Path  # Of the run, or a folder of exported adapters.
    # None for the run of a script.
    config: ConfigDict | None = dataclasses.field(repr=False)
    devices: DeviceManager
    which: str  # `latest`, `best`, or a step.
    # Of a script's run: its experiment, or a function of the devices that makes it.
    script: Experiment | Callable[[DeviceManager], Experiment] | None = None

    @classmethod
    def open(
        cls,
        workdir: str | Path,
        devices: DeviceManager | None = None,
        which: str | int = "latest",
        experiment: Experiment | Callable[[DeviceManager], Experiment] | None = None,
        trust: Sequence[str] = (),
    ) -> "Run":
        """Opens a run; raises `ConfigError` if there is neither config nor experiment.

        `devices` are by default those of `DeviceManager.create()`. `experiment` is for
        the run of a script. Code that a config names is imported from the current
        directory, and from the paths and modules of `trust`.
        """
        workdir = Path(workdir)
        config = of_run(workdir, trust) if experiment is None else None
        if config is not None:
            if config.compat:
                compat.install()  # Before anything of the config's is imported.
            check_code(config, trust)
        devices = DeviceManager.create() if devices is None else devices
        return cls(workdir, config, devices, str(which), experiment)

    @functools.cached_property
    def trainer(self) -> Trainer:
        """Trainer of the run; raises `ConfigError` if it cannot be made here."""
        padding = 0
        if self.config is not None:
            config = self.config.copy_and_resolve_references()
            if is_lost(config.init_from):
                config = without_source(config, self.family)
            config.data.placement = "host"
            # Larger, so that it splits over these devices; the rest is padding.
            divisor = self.devices.num_devices * config.accumulate_steps
            padding = -config.batch_size % divisor
            config.batch_size += padding
            steps = min(config.optimizer.warmup_steps, max(config.num_steps - 1, 0))
            config.optimizer.warmup_steps = steps  # As training cut it, and said.
            if (config.exact_elastic or 0) % self.devices.num_devices:
                config.exact_elastic = None  # Such a number of devices has no shares.
            if self._holds_adapters:
                config.finetuning.adapters = str(self.workdir)
            experiment = Experiment.from_config(config, self.devices)
        elif isinstance(self.script, Experiment):
            experiment = self.script
        else:
            experiment = self.script(self.devices)
            if not isinstance(experiment, Experiment):
                kind = type(experiment).__name__
                raise ConfigError(f"--experiment returned a {kind}, and no Experiment")
        experiment = dataclasses.replace(experiment, placement="host")
        trainer = experiment.trainer(self.devices)
        if not padding:  # Other shapes have other fingerprints.
            fingerprint.warn_of_changes(self.workdir, trainer)
        return trainer

    @functools.cached_property
    def checkpoint(self) -> tuple[int, TrainState]:
        """The step and the train state, on the devices.

        Raises `ConfigError` if there is none or the frozen parameters changed,
        `StorageError` if it is damaged.
        """
        trainer = self.trainer
        # It may be asked for first among explicit transfers: of a batch's outputs.
        with self.devices.implicit_transfers():
            return self._restored(trainer)

    def _restored(self, trainer: Trainer) -> tuple[int, TrainState]:
        abstract = trainer.abstract.saved()
        if self._holds_adapters:
            step = read_facts(self.workdir / ADAPTERS)["step"]
            if self.which not in ("latest", str(step)):
                raise ConfigError(
                    f"--checkpoint={self.which} is not in {self.workdir}; its adapters "
                    f"are of step {step}"
                )
            return step, trainer.init()
        step, saved = restore(
            self.workdir,
            self.which,
            lambda checkpoints, step: checkpoints.restore(step, abstract),
        )
        state = TrainState(**saved, frozen=trainer.initializer.frozen(trainer.layout))
        if trainer.experiment.init_from is not None:
            check_same_frozen(self.devices, state.frozen, self.workdir)
        return step, state

    @property
    def step(self) -> int:
        """Step of the checkpoint."""
        return self.checkpoint[0]

    @property
    def state(self) -> TrainState:
        """Train state of the checkpoint."""
        return self.checkpoint[1]

    @property
    def _holds_adapters(self) -> bool:
        return is_file(self.workdir / ADAPTERS)

    def parameters(self) -> tuple[hk.Params, hk.State]:
        """Parameters and network state: averages if there are any, adapters merged.

        Those of a run with frozen parameters are on the host, as NumPy arrays.
        """
        return self.trainer.merged(self.state)

    def model(self) -> tuple[Callable[[Any, Any], Any], tuple]:
        """Pure function of (variables, inputs [B, ...]), and the variables.

        It gives the outputs of evaluation, [B, ...], and is for `jax.jit`, `jax.grad`
        and `jax.vmap`. Variables are parameters, network state and step. A third
        argument is the model's PRNG key, by default None.
        """
        self.check_outputs()
        experiment = self.trainer.experiment
        precision = Precision.create(experiment.precision)
        recipe = self.trainer.recipe._replace(
            model=for_devices(with_state(experiment.model), None),
            # Who compiles it may not have the flag of `xla_flags`.
            precision=precision._replace(keeps_norms_apart=True),
            plan=Plan(),  # All is merged.
        )

        def forward(variables: Any, inputs: Any, rng: Any = None) -> Any:
            batch, run_model = {"inputs": inputs}, experiment.steps.forward
            facts, _ = run_model(recipe, variables, {}, batch, (rng, None), False)
            return plain_outputs(facts["outputs"])

        function = with_axis(forward, self.devices.axis_name)
        params, net_state = self.parameters()
        if self.trainer.recipe.plan.frozen:
            params = self.devices.replicate(params)
        return function, (params, net_state, np.int32(self.step))

    @property
    def family(self) -> Family | None:
        """Family of the model; None without one."""
        if self.config is None:
            return self.trainer.experiment.family
        return family_of(self.config.model.name)

    def check_outputs(self) -> None:
        """Raises `ConfigError` for a script's run that has no model."""
        if self.trainer.experiment.model is None:
            raise ConfigError(
                f"the experiment of {self.workdir} has no model, and so no outputs to "
                "predict or export; give Experiment(model=...) beside its step"
            )

    def evaluation_set(self) -> Any:
        """The data to evaluate on; raises `ConfigError` if there are none."""
        if (dataset := self.trainer.experiment.data.evaluation) is None:
            raise ConfigError(
                f"the data set of the run in {self.workdir} has nothing to evaluate on "
                "or to predict"
            )
        return dataset

    def predict(self, arrays: Any) -> Any:
        """Outputs [N, ...] on the host, of arrays [N, ...] as in a batch of the run.

        An array alone is the `inputs`. On several devices each has its share, and the
        last batch is padded; of several processes each predicts its own arrays. Raises
        `ConfigError` for other shapes, dtypes or names than the run's.
        """
        self.check_outputs()
        state = self.state
        with self.devices.explicit_transfers():
            outputs = list(self.trainer.predict(state, arrays))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *outputs)

    def evaluate(
        self, examples: Any = None, where: str = "the set of examples"
    ) -> dict[str, float]:
        """Metrics of the evaluation set; those of classes also give confusion.png.

        Of other `examples`, arrays [N, ...] as in a batch of the run or an evaluation
        set, metrics alone; `where` names them in errors. Raises `ConfigError` as
        `predict`, and for missing labels.
        """
        from haiku_template.data.examples import as_labelled

        data, size = self.trainer.experiment.data, self.trainer.feed.batch_size
        if examples is None:
            self.evaluation_set()
        else:
            kind = self.trainer.recipe.task.labels
            examples = as_labelled(examples, data, size, where, kind)
        with self.devices.explicit_transfers():
            metrics, counts = self.trainer.measure(self.state, examples)
        if "confusion" in counts and examples is None:
            numbers = range(len(counts["confusion"]))
            names = tuple(map(str, data.class_names or numbers))
            title = f"{self.workdir.name}, step {self.step}"
            plots.write_confusion(self.workdir, counts["confusion"], names, title)
        return metrics
