"""Exports as ONNX, by the real jax2onnx and onnxruntime: `make test-onnx`."""

import functools
import importlib.metadata
import json

import jax
import numpy as np
import pytest

from haiku_template.errors import ConfigError
from haiku_template.runs import Run, export_onnx
from haiku_template.runs.onnx import _check, convert_onnx
from tests.runs import ROOT
from tests.test_export import trained


def computed(file, inputs):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file))
    inputs = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    assert {x.name for x in session.get_inputs()} == set(inputs)
    assert [x.name for x in session.get_outputs()] == ["outputs"]
    facts = session.get_modelmeta().custom_metadata_map
    return session.run(None, inputs)[0], facts


@pytest.mark.onnx
@pytest.mark.parametrize("name", ["mlp", "resnet", "bert", "gpt"])
def test_onnxruntime_computes_the_same_for_any_number_of_examples(
    tmp_path, one_device, name
):
    _, workdir = trained(tmp_path, one_device, name)
    run = Run.open(workdir, one_device)
    file = tmp_path / "forward.onnx"
    assert export_onnx(run, file) == 1
    batch = run.trainer.experiment.data.train.batch(0)["inputs"]
    model, variables = run.model()
    for size in (1, 3, 8):
        inputs = jax.tree.map(lambda x, size=size: x[:size], batch)
        outputs, facts = computed(file, inputs)
        expected = jax.jit(model)(variables, inputs)
        np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-5)
    names = ["bad", "good"] if name == "bert" else []
    assert facts == {"step": "1", "class_names": json.dumps(names)}


@pytest.mark.onnx
def test_the_command_writes_a_program_of_one_size(tmp_path, one_device, command):
    _, workdir = trained(tmp_path, one_device, "mlp")
    file, flags = tmp_path / "two.onnx", ["--format=onnx", "--batch_size=2"]
    flags += [f"--workdir={workdir}", f"--output={file}", "--device=cpu"]
    done = command("export", *flags, PYTHONPATH=str(ROOT), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and "step 1 of" in done.stdout
    run = Run.open(workdir, one_device)
    inputs = run.trainer.experiment.data.train.batch(0)["inputs"][:2]
    np.testing.assert_allclose(
        computed(file, inputs)[0], run.predict(inputs), atol=1e-5
    )


@pytest.mark.onnx
def test_what_cannot_be_converted_is_a_sentence():
    def forward(inputs):
        return jax.numpy.linalg.eigh(inputs @ inputs.swapaxes(1, 2))[0]

    version = importlib.metadata.version("jax2onnx")
    with pytest.raises(ConfigError, match=f"jax2onnx {version} cannot convert"):
        convert_onnx(forward, np.zeros((3, 4, 4), np.float32))


@pytest.mark.onnx
def test_a_program_that_computes_something_else_is_not_written(
    tmp_path, one_device, monkeypatch
):
    _, workdir = trained(tmp_path, one_device, "mlp")
    monkeypatch.setattr("haiku_template.runs.onnx.TOLERANCE", -1.0)
    with pytest.raises(ConfigError, match="onnxruntime's outputs differ"):
        export_onnx(Run.open(workdir, one_device), tmp_path / "a.onnx")
    assert not (tmp_path / "a.onnx").exists()


@pytest.mark.onnx
def test_infinities_must_be_the_same():
    inputs = np.ones((4, 3), np.float32)

    def masked(x, value=-np.inf):
        return jax.numpy.where(jax.numpy.arange(3) == 2, value, x)

    program = convert_onnx(masked, inputs).SerializeToString()
    _check(program, masked, inputs, None)
    for other in (np.inf, 0.0, np.nan):
        wrong = functools.partial(masked, value=other)
        with pytest.raises(ConfigError, match="onnxruntime's outputs differ"):
            _check(program, wrong, inputs, None)


@pytest.mark.onnx
def test_an_output_that_is_named_as_an_input_is_told_apart():
    inputs = {"a": np.ones((4, 3), np.float32)}
    model = convert_onnx(lambda x: {"a": x["a"] * 2, "b": x["a"] * 3}, inputs)
    assert {x.name for x in model.graph.output} == {"outputs/a", "b"}


def test_what_is_not_installed_is_named(tmp_path, one_device, monkeypatch):
    _, workdir = trained(tmp_path, one_device, "mlp")
    run = Run.open(workdir, one_device)
    monkeypatch.setattr("haiku_template.runs.onnx.PACKAGES", ("jax2onnx_absent",))
    with pytest.raises(ConfigError, match="not installed are jax2onnx_absent: pip in"):
        export_onnx(run, tmp_path / "a.onnx")
    with pytest.raises(ConfigError, match="does not end in .onnx"):
        export_onnx(run, tmp_path / "folder")
