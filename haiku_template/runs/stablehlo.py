"""Export of a checkpoint as StableHLO, which JAX runs without Haiku."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from haiku_template.data import each_shape
from haiku_template.errors import ConfigError
from haiku_template.models import MODELS, plain_outputs
from haiku_template.params import leaves_by_path
from haiku_template.pretrained import check_new, new_folder
from haiku_template.registry import resolve
from haiku_template.runs.run import Run
from haiku_template.training.experiment import make_model
from haiku_template.training.precision import Precision
from haiku_template.training.trainer import with_state

PROGRAM, DESCRIPTION = "forward.stablehlo", "forward.json"
PLATFORMS = ("cpu", "cuda")
MOST_BYTES = 2**31  # Most that jax.export serializes, parameters included.


def export_stablehlo(run: Run, output: Path) -> int:
    """Writes the forward pass with its parameters, as `jax.export` serializes it.

    `jax.export.deserialize(forward.stablehlo's bytes).call(inputs)` returns the
    outputs, on a CPU or an NVIDIA GPU, for a batch of any size. forward.json describes
    the inputs: the data set's, in their largest shape. Returns and raises as
    `export_safetensors`, and besides:

    Raises:
      ConfigError: the model is too large, or needs a batch of one size.
    """
    check_new(output)
    _check_flatbuffers()
    config, data = run.config, run.trainer.experiment.data
    whole = run.devices.fetch(run.model())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(whole))
    if size >= MOST_BYTES:
        raise ConfigError(
            f"the parameters take {size:,} bytes, and a StableHLO file holds less than "
            f"{MOST_BYTES:,}; --format=safetensors has no such limit"
        )
    forward = run.trainer.experiment.step.make_forward(
        model=with_state(_portable_model(run)),
        preprocess=data.preprocess,
        precision=Precision.create(config.precision),
        combine=lambda params, frozen: params,
    )
    exported, serialised = export_forward(
        lambda inputs: plain_outputs(forward(whole, {}, inputs)),
        each_shape(data.train)[0]["inputs"],
    )
    described = {
        "step": run.step,
        "jax": jax.__version__,
        "platforms": list(exported.platforms),
        "inputs": _described(_inputs(exported)),
        "outputs": _described(
            jax.tree.unflatten(exported.out_tree, exported.out_avals)
        ),
        "class_names": list(data.class_names),
    }
    with new_folder(output) as folder:
        (folder / PROGRAM).write_bytes(serialised)
        (folder / DESCRIPTION).write_text(json.dumps(described, indent=2) + "\n")
    return run.step


def export_forward(
    forward: Callable[[Any], Any], inputs: Any
) -> tuple[jax.export.Exported, bytearray]:
    """Lowers a function of inputs [B, ...] for any B; returns it with its bytes.

    Raises:
      ConfigError: JAX cannot; the message has JAX's reason.
    """
    (batch,) = jax.export.symbolic_shape("b")

    def any_size(x: np.ndarray) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct((batch, *x.shape[1:]), dtype)

    try:
        compiled = jax.jit(lambda inputs: forward(inputs))
        exported = jax.export.export(compiled, platforms=PLATFORMS)(
            jax.tree.map(any_size, inputs)
        )
        return exported, exported.serialize()
    except Exception as error:  # JAX has many classes of them.
        raise ConfigError(
            "the model cannot be exported for a batch of any size, on "
            f"{' and '.join(PLATFORMS)}: {str(error).splitlines()[0]}"
        ) from error


def _portable_model(run: Run) -> Any:
    """Makes the model for one device of any platform, compiled by XLA alone."""
    config = run.config.copy_and_resolve_references()
    function = resolve("model", config.model.name, MODELS)
    if "attention" in inspect.signature(function).parameters:
        config.model.attention = "xla"
    return make_model(config, run.trainer.experiment.data.num_outputs)


def _inputs(exported: jax.export.Exported) -> Any:
    (inputs,), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    return inputs


def _described(tree: Any) -> dict[str, Any]:
    """Describes shapes and dtypes by name, "" for a single array; `b` is the batch."""
    return {
        path: {
            "shape": [n if isinstance(n, int) else str(n) for n in leaf.shape],
            "dtype": str(leaf.dtype),
        }
        for path, leaf in leaves_by_path(tree, simple=True).items()
    }


def _check_flatbuffers() -> None:
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "jax.export writes through flatbuffers, which is not installed: pip "
            'install "haiku_template[export]"'
        ) from error
