"""Export of a checkpoint as ONNX, which other runtimes read."""

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from haiku_template.devices import canonical_shapes
from haiku_template.errors import ConfigError
from haiku_template.params import flatten
from haiku_template.pretrained import check_new, new_file
from haiku_template.runs.run import Run
from haiku_template.runs.stablehlo import in_a_line, program_of

Function = Callable[[Any], Any]
PACKAGES = ("jax2onnx", "flax", "onnx", "onnxruntime")
INSTALL = (  # Why: docs/decisions/dependencies.md#onnx
    'pip install "haiku_template[onnx]" && pip install --no-deps "jax2onnx>=0.17"'
)
TOLERANCE = 1e-5  # Of the largest output, or of 1.


def export_onnx(run: Run, output: Path, batch_size: int | None = None) -> int:
    """Writes the forward pass with its parameters to a new file, `output`.onnx.

    Inputs are named as in a batch, and have the data set's largest shape, for a batch
    of any size, or of `batch_size`; `outputs` are those of evaluation. The metadata
    have `step` and `class_names`. onnxruntime has computed the outputs of the training
    set's first batch within 1e-5 of the largest. Returns and raises as
    `export_stablehlo`, and `ConfigError` if the program computes something else.
    """
    if output.suffix != ".onnx":
        raise ConfigError(f"--output={output} does not end in .onnx")
    check_new(output)
    if absent := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            "ONNX is written by jax2onnx and checked by onnxruntime, and not installed "
            f"are {', '.join(absent)}: {INSTALL}"
        )
    program, inputs = program_of(run)
    with run.devices.on_host():
        model = convert_onnx(program, inputs, batch_size)
        names = [*map(str, run.trainer.experiment.data.class_names)]
        model.metadata_props.add(key="step", value=str(run.step))
        model.metadata_props.add(key="class_names", value=json.dumps(names))
        serialized = model.SerializeToString()
        for size in [1, None] if batch_size is None else [batch_size]:
            _check(serialized, program, inputs, size)
    with new_file(output) as file:
        file.write_bytes(serialized)
    return run.step


def convert_onnx(program: Function, inputs: Any, batch_size: int | None = None) -> Any:
    """Converts a function of inputs [B, ...] to ONNX's ModelProto; None is for any B.

    Raises `ConfigError` with the reason of jax2onnx.
    """
    specs = canonical_shapes(inputs, rows=batch_size)
    if batch_size is None:
        specs = jax.export.symbolic_args_specs(specs, "b, ...")
    joined = jax.tree.structure(inputs).unflatten
    for name in ("jax2onnx", "onnx_ir"):  # They warn of plugins that are not there.
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with _names_that_jax_had():
            taken = _names(inputs, "inputs")
            returned = _names(jax.eval_shape(program, inputs), "outputs")
            return importlib.import_module("jax2onnx").to_onnx(
                lambda *leaves: program(joined(leaves)),
                jax.tree.leaves(specs),
                model_name="forward",
                input_names=list(taken),
                output_names=[f"outputs/{k}" if k in taken else k for k in returned],
            )
    except Exception as error:  # JAX, Haiku and jax2onnx each have classes of them.
        size = "any size" if batch_size is None else f"{batch_size}"
        version = importlib.metadata.version("jax2onnx")
        raise ConfigError(
            f"jax2onnx {version} cannot convert the model for a batch of {size}: "
            f"{in_a_line(error)}; MLPs, ResNets and BERT are known to work, and "
            "--format=stablehlo takes most models"
        ) from error


def _names(tree: Any, whole: str) -> dict[str, Any]:
    """Leaves by path; a single array is named as the `whole`."""
    return {path or whole: leaf for path, leaf in flatten(tree).items()}


@contextlib.contextmanager
def _names_that_jax_had() -> Iterator[None]:
    """Context of the class that jax2onnx 0.17 looks for, and jax 0.12 has no more."""
    core = importlib.import_module("jax._src.core")
    is_gone = not hasattr(core, "ClosedJaxpr")
    if is_gone:  # There it is one with Jaxpr.
        core.ClosedJaxpr = core.Jaxpr
    try:
        yield
    finally:
        if is_gone:
            del core.ClosedJaxpr


def _check(serialized: bytes, program: Function, inputs: Any, rows: int | None) -> None:
    """Raises `ConfigError` unless onnxruntime computes what the `program` does."""
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # Errors.
    specs = canonical_shapes(inputs, rows=rows)
    batch = jax.tree.map(
        lambda x, like: np.resize(x, like.shape).astype(like.dtype), inputs, specs
    )
    try:
        session = runtime.InferenceSession(
            serialized, options, providers=["CPUExecutionProvider"]
        )
        computed = session.run(None, _names(batch, "inputs"))
    except Exception as error:  # Of onnxruntime's own, each from RuntimeError or not.
        raise ConfigError(
            "onnxruntime cannot run what jax2onnx made of the model: "
            f"{in_a_line(error)}; --format=stablehlo takes most models"
        ) from error
    expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(program)(batch))]
    for result, outputs in zip(computed, expected, strict=True):
        finite = np.isfinite(outputs)  # The others must be the same.
        same = np.array_equal(result[~finite], outputs[~finite], equal_nan=True)
        result, outputs = result[finite].astype(np.float64), outputs[finite]
        limit = TOLERANCE * max(1.0, float(np.abs(outputs).max(initial=0)))
        off = float(np.abs(result - outputs).max(initial=0 if same else np.inf))
        if not off <= limit:
            raise ConfigError(
                f"onnxruntime's outputs differ from the model's by {off:.2g}, and "
                f"{limit:.2g} is allowed; --format=stablehlo is compiled as the model"
            )
