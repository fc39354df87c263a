"""Export of a checkpoint as StableHLO, which JAX runs without Haiku."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from haiku_template.data.examples import evaluated
from haiku_template.devices import canonical_shapes
from haiku_template.errors import ConfigError, need_package
from haiku_template.models.forms import inputs_of
from haiku_template.params import flatten, in_dictionaries
from haiku_template.pretrained import check_new, new_folder
from haiku_template.runs.run import Run
from haiku_template.training.evaluation import evaluation_rng
from haiku_template.training.initial import dependents
from haiku_template.training.state import Recipe

PLATFORMS = ("cpu", "cuda")  # Why: docs/decisions/finetuning.md#lowered
LENGTH = " (in the model x.shape[0] may do where len(x) does not)"
MOST_BYTES = 2**31  # Most that jax.export and ONNX serialize, parameters included.


def export_stablehlo(run: Run, output: Path, batch_size: int | None = None) -> int:
    """Writes the forward pass with its parameters, as `jax.export` serializes it.

    `jax.export.deserialize(forward.stablehlo's bytes).call(inputs)` returns the
    outputs, on a CPU or an NVIDIA GPU, for a batch of any size, or of `batch_size`.
    forward.json describes the inputs: the data set's, in their largest shape. Returns
    and raises as `export_safetensors`, and `ConfigError` if the model is too large, or
    needs a batch of one size.
    """
    check_new(output)
    use = "jax.export writes through flatbuffers"
    need_package("flatbuffers", use, '"haiku_template[export]"')
    program, inputs = program_of(run)
    exported, serialized = export_forward(program, inputs, batch_size)
    (inputs,), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    described = {
        "step": run.step,
        "jax": jax.__version__,
        "platforms": list(exported.platforms),
        "inputs": _described(inputs),
        "outputs": _described(outputs),
        "class_names": [*map(str, run.trainer.experiment.data.class_names)],
    }
    with new_folder(output) as folder:
        (folder / "forward.stablehlo").write_bytes(serialized)
        (folder / "forward.json").write_text(json.dumps(described, indent=2) + "\n")
    return run.step


def program_of(run: Run) -> tuple[Callable[[Any], Any], Any]:
    """Outputs [B, ...] as a function of the inputs, and inputs of the largest shape.

    Raises `ConfigError` for parameters that are too large for a file of a program, and
    outputs that depend on a PRNG key.
    """
    model, variables = run.model()
    variables = run.devices.fetch(variables)
    if (size := hk.data_structures.tree_bytes(variables[:2])) >= MOST_BYTES:
        raise ConfigError(
            f"the parameters take {size:,} bytes, and a program's file holds less than "
            f"{MOST_BYTES:,}; --format=safetensors has no such limit"
        )
    batch = evaluated(run.trainer.experiment.data)
    inputs = inputs_of(batch, run.trainer.recipe.task.whole_batch)
    program = functools.partial(model, variables)
    _check_draws_nothing(program, inputs, run.trainer.recipe)
    try:
        jax.eval_shape(program, inputs)
    except ValueError:  # Haiku's: the model asks for a key that changes nothing.
        return lambda inputs: model(variables, inputs, jax.random.key(0)), inputs
    return program, inputs


def _check_draws_nothing(program: Callable, inputs: Any, recipe: Recipe) -> None:
    places = jax.ShapeDtypeStruct(jax.tree.leaves(inputs)[0].shape[:1], jnp.int32)
    key = jax.eval_shape(functools.partial(evaluation_rng, recipe), places)

    def of_key(key: jax.Array) -> Any:  # A model may refuse NumPy's arrays.
        zeros = [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(shapes)]
        return program(jax.tree.structure(shapes).unflatten(zeros), key)

    # Layers in a stack ask for a key, too, and do without.
    shapes = canonical_shapes(inputs)
    if dependents(of_key, key, None)[1]:
        raise ConfigError(
            "the model cannot be exported: its outputs depend on a PRNG key in "
            "evaluation, too; let it draw random numbers only if is_training, or take "
            "--format=safetensors, its parameters alone"
        )


def export_forward(
    forward: Callable[[Any], Any], inputs: Any, batch_size: int | None = None
) -> tuple[jax.export.Exported, bytearray]:
    """Lowers a function of inputs [B, ...] and serializes it; None is for any B.

    Named tuples and dataclasses are dictionaries there. Raises `ConfigError` with JAX's
    reason.
    """
    structure = jax.tree.structure(inputs)
    # Dictionaries sort their keys; fields of other trees have an order of their own.
    numbers = structure.unflatten(range(structure.num_leaves))
    order = np.argsort(jax.tree.leaves(in_dictionaries(numbers)))

    def of_dictionaries(inputs: Any) -> Any:
        leaves = jax.tree.leaves(inputs)
        inputs = structure.unflatten(leaves[i] for i in order)
        return in_dictionaries(forward(inputs))

    specs = canonical_shapes(in_dictionaries(inputs), rows=batch_size)
    size, advice = f"of {batch_size}", ""
    if batch_size is None:
        size, advice = "of any size", "; --batch_size=1 is for a model of one size"
        specs = jax.export.symbolic_args_specs(specs, "b, ...")
    try:
        export = jax.export.export(jax.jit(of_dictionaries), platforms=PLATFORMS)
        exported = export(specs)
        return exported, exported.serialize()
    except Exception as error:  # JAX has many classes of them.
        raise ConfigError(
            f"the model cannot be exported for a batch {size}, on "
            f"{' and '.join(PLATFORMS)}: {in_a_line(error)}{advice}"
        ) from error


def in_a_line(error: Exception) -> str:
    """First line of an error's words, or its class, where it has none."""
    line = str(error).partition("\n")[0] or type(error).__name__
    return line + LENGTH * ("'_DimExpr' object cannot be interpreted" in line)


def _described(tree: Any) -> dict[str, Any]:
    """Describes shapes and dtypes by name, "" for a single array; `b` is the batch."""
    return {
        name: {
            "shape": [n if isinstance(n, int) else str(n) for n in leaf.shape],
            "dtype": str(leaf.dtype),
        }
        for name, leaf in flatten(tree).items()
    }
