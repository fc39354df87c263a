"""Sources of a first state: the seed, pretrained parameters, the first batch."""

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import haiku as hk
import jax

from haiku_template import finetuning as tuning
from haiku_template.data import whole_batches
from haiku_template.devices import (
    DeviceManager,
    Layout,
    canonical_shapes,
    check_host_batch,
)
from haiku_template.errors import ConfigError
from haiku_template.models.forms import inputs_of
from haiku_template.params import flatten, unflatten
from haiku_template.training.custom import make_custom_init
from haiku_template.training.initial import dependents, make_init, trace_model_init
from haiku_template.training.state import Recipe, TrainState

if TYPE_CHECKING:
    from haiku_template.training.experiment import Experiment

logger = logging.getLogger(__name__)


class Initializer:
    """Initializer of an experiment's train state; nothing is allocated before `init`.

    Attributes:
      recipe: the experiment's, with its plan of trainable and frozen parameters.
      abstract: shapes and dtypes of the first state.
      from_batch: leaves of the first state, by path, that are made of the first batch.
    """

    def __init__(
        self,
        experiment: "Experiment",
        devices: DeviceManager,
        recipe: Recipe,
        example: Any,
    ) -> None:
        self._experiment, self._devices, self._example = experiment, devices, example
        self._params, self._net_state, self.from_batch = {}, {}, ()
        self._model_init: Callable[..., Any] | None = None
        if experiment.init is None:
            self._model_init, shapes, self.from_batch = trace_model_init(
                recipe, example, devices.axis_name
            )
            shapes = Layout(devices.devices).place(shapes)
            self._params, self._net_state = shapes["params"], shapes["net_state"]
        plan = tuning.Plan(frozenset(flatten(self._params)))  # All train.
        if experiment.finetuning != tuning.Finetuning():
            axes = tuning.convolutions(lambda: devices.abstract(self._model_init))
            plan = tuning.make_plan(experiment.finetuning, self._params, axes)
        self.recipe = recipe._replace(plan=plan)
        self._init = self.function(devices.axis_name)
        self.abstract = self._trace()

    def function(self, axis_name: str | None) -> Callable[..., TrainState]:
        """Makes the pure function of pretrained leaves to a first state."""
        recipe = self.recipe._replace(axis_name=axis_name)
        if self._experiment.init is None:
            return make_init(recipe, self._model_init)
        return make_custom_init(recipe, self._experiment.init, self._example)

    def _trace(self) -> TrainState:
        experiment, devices = self._experiment, self._devices
        if experiment.init is not None:
            init = functools.partial(self._init, {}, None)
            shapes, self.from_batch = dependents(init, self._example, devices.axis_name)
            return shapes
        if experiment.init_from is not None:  # What is read is of no batch.
            paths = flatten(self._params).keys() - self.recipe.plan.fresh
            read = {f"params/{path}" for path in paths}
            self.from_batch = tuple(x for x in self.from_batch if x not in read)
        shapes = devices.abstract(self._init, {})
        if self.recipe.plan.frozen:
            return shapes._replace(frozen=devices.abstract(self._frozen_of_seed))
        return shapes

    def init(self, layout: Layout) -> TrainState:
        """Makes the train state before step 0 where a layout has it.

        Raises:
          ConfigError: pretrained parameters cannot be read, or do not fit; or what is
            of the first batch cannot be had, as this process reads a part of that.
        """
        frozen = self.frozen(layout)
        leaves, net_state = self._pretrained(frozen)
        inputs = self._first_inputs()
        state = self._devices.init(
            self._init, leaves, net_state, *inputs, layout=layout
        )
        return state._replace(frozen=frozen)

    def lower(self, layout: Layout) -> Any:
        """Lowers the function that makes the first state from the seed."""
        if not self.from_batch:
            return self._devices.lower_init(self._init, {}, layout=layout)
        inputs = canonical_shapes(self._inputs(self._example), self._devices.replicated)
        init = functools.partial(self._init, {}, None)
        return self._devices.lower_init(init, inputs, layout=layout)

    def _first_inputs(self) -> list[Any]:
        """Puts what is needed of the first batch on the devices, if anything is."""
        if not self.from_batch:
            return []
        batch = whole_batches(self._experiment.data.train).batch(0)
        rows = check_host_batch(batch)
        size = len(jax.tree.leaves(self._example)[0])
        if rows != size:
            raise ConfigError(
                f"{', '.join(self.from_batch)} depend on the data of the first batch, "
                f"and this process reads {rows} of the {size} examples in it; "
                "initialize them from the seed alone, or train in one process"
            )
        return [self._devices.replicate(self._inputs(batch))]

    def _inputs(self, batch: Any) -> Any:
        if self._experiment.init is not None:
            return batch
        return inputs_of(batch, self.recipe.task.whole_batch)

    def frozen(self, layout: Layout) -> hk.Params:
        """Reads the frozen parameters onto the devices, or makes them from the seed."""
        if not self.recipe.plan.frozen:
            return {}
        if self._experiment.init_from is None:
            logger.warning(
                "frozen parameters were never trained: config.init_from is None, so "
                "that they come from the seed"
            )
            make = lambda *inputs: {"frozen": self._frozen_of_seed(*inputs)}  # noqa: E731
            inputs = self._first_inputs()
            return self._devices.init(make, *inputs, layout=layout)["frozen"]
        abstract = layout.place({"frozen": self.abstract.frozen})
        return self._devices.load(self._read_frozen, abstract, layout)["frozen"]

    def _read_frozen(self, abstract: dict[str, hk.Params]) -> dict[str, hk.Params]:
        shapes = hk.data_structures.merge(self._params, abstract["frozen"])
        trained = self.recipe.plan.trained
        leaves, _ = self._experiment.init_from(shapes, trained, None)
        return {"frozen": unflatten(leaves)}

    def _frozen_of_seed(self, inputs: Any = None) -> hk.Params:
        return self.recipe.plan.split(self._model_init(inputs)[0])[1]

    def _pretrained(self, frozen: hk.Params) -> tuple[dict[str, Any], Any]:
        """Reads pretrained trainable parameters, by path, and Haiku state."""
        source, plan = self._experiment.init_from, self.recipe.plan
        adapters = self._experiment.finetuning.adapters
        leaves, net_state = {}, None
        if source is not None:
            skip = plan.frozen | plan.fresh
            leaves, net_state = source(self._params, skip, self._net_state)
        if adapters is not None:
            params = tuning.load_adapters(
                adapters, self.abstract.params, frozen, plan.lora, self._devices
            )
            leaves = flatten(params)
        return leaves, net_state
