"""GPUs that are not here: what --target says, and what is read from a program.

No CUDA plugin is needed; `tests/target` compiles with one.
"""

import gzip
import os
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from haiku_template.errors import ConfigError, DeviceError
from haiku_template.preflight import targets
from haiku_template.preflight.program import program_table, read_program

# One block of a GPT in bfloat16 on two H100s, two micro-batches: compiled with jax
# 0.10.2 for this test, without metadata.
GPT = Path(__file__).parent / "programs/gpt_2_h100.hlo.gz"
OVERLAP = """
HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[4,4], y: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %y = f32[4,4]{1,0} parameter(1)
  %r-start = f32[4,4]{1,0} all-reduce-start(%x), to_apply=%add
  BETWEEN
  %r-done = f32[4,4]{1,0} all-reduce-done(%r-start)
  ROOT %z = f32[4,4]{1,0} add(%r-done, %y)
}
"""
PRODUCT = "%p = f32[4,4]{1,0} dot(%y, %y), lhs_contracting_dims={1}"


@pytest.fixture
def installed(monkeypatch):
    def install(**versions):
        found = [
            SimpleNamespace(name=name.replace("_", "-"), version=version)
            for name, version in versions.items()
        ]
        monkeypatch.setattr(
            targets.importlib.metadata, "distributions", lambda: iter(found)
        )

    return install


@pytest.mark.parametrize("target", ["h1000", "h100x", "list8", "/no/such/file"])
def test_an_unknown_target_names_those_that_are_known(target):
    with pytest.raises(ConfigError, match=rf"--target={target} is .*t4, .*h100, .*x8"):
        targets.target_devices(target)


def test_a_target_that_is_nearly_one_is_named():
    with pytest.raises(ConfigError, match="x8; nearest is h100"):
        targets.target_devices("H100x8")


@pytest.mark.parametrize("content", ["", "device_memory_size: many"])
def test_a_file_without_a_card_is_refused(tmp_path, content):
    file = tmp_path / "card.txtpb"
    file.write_text(content)
    with pytest.raises(ConfigError, match="is no target: device_memory_size: BYTES is"):
        targets.target_devices(str(file))


@pytest.mark.parametrize("share", [0.0, -0.5, 5.0])
def test_no_share_of_a_cards_memory_is_refused(share):
    with pytest.raises(DeviceError, match=f"gpu_memory_fraction={share} is not"):
        targets.target_devices("h100", share)


def test_no_device_is_no_target():
    with pytest.raises(
        ConfigError, match="h100x0 is no target: one GPU or more is needed"
    ):
        targets.target_devices("h100x0")


@pytest.mark.parametrize(
    ("found", "missing"),
    [({}, "JAX's CUDA plugin"), ({"jax_cuda12_plugin": version("jaxlib")}, "cuDNN")],
)
def test_what_is_not_installed_is_named_with_its_remedy(installed, found, missing):
    installed(**found)
    words = rf'with {missing}, .* pip install "haiku_template\[target\]"'
    with pytest.raises(DeviceError, match=words):
        targets.target_devices("h100")


def test_a_plugin_for_cuda_13_is_not_joined_by_one_for_12(installed):
    installed(jax_cuda13_plugin=version("jaxlib"), nvidia_cudnn_cu12="9.10")
    wheels = rf'nvidia-cudnn-cu13 "jax-cuda13-plugin=={version("jaxlib")}"$'
    with pytest.raises(DeviceError, match=f"cuDNN, .* pip install {wheels}"):
        targets.target_devices("h100")


def test_a_plugin_of_another_version_is_refused_before_xla_aborts(installed):
    installed(jax_cuda12_plugin="0.1.0", nvidia_cudnn_cu12="9.1")
    words = f"jax-cuda12-plugin is 0.1.0 and jaxlib is {version('jaxlib')}; .* pip"
    with pytest.raises(DeviceError, match=words):
        targets.target_devices("h100")


def test_a_target_after_jax_has_started_on_other_flags_is_refused(
    installed, monkeypatch
):
    jax.devices()
    installed(jax_cuda12_plugin=version("jaxlib"), nvidia_cudnn_cu12="9.10")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    words = rf"--target=h100 sets XLA_FLAGS={targets.FLAGS}, and JAX has started .* set"
    with pytest.raises(DeviceError, match=words):
        targets.target_devices("h100")
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=/nowhere"


def test_a_program_of_a_gpt_is_read():
    text = gzip.decompress(GPT.read_bytes()).decode()
    program = read_program(text)
    # A block, twice; one of the micro-batches is in a loop.
    assert program.attention == (2, 2)
    assert sum(program.products.values()) == 40
    assert all(name.startswith("bf16 x bf16") for name in program.products)
    size = 256 * 64 + 64 * 64 + 12 * 64**2 + 13 * 64 + 2 * 64  # Parameters.
    assert sum(program.all_reduces) // 4 in range(size, size + 8)  # And scalars.
    assert program.host_copies == 0
    assert 100 < program.launches < 1000
    # 4 B H T C + 4 B H T + 256, of the two examples in a micro-batch on each GPU.
    assert program.workspace == 4 * 2 * 2 * 64 * 33 + 256
    compiled = SimpleNamespace(
        as_text=lambda: text,
        memory_analysis=lambda: SimpleNamespace(alias_size_in_bytes=0),
    )
    cells = program_table(compiled, size).columns[1].cells
    assert "cuDNN: 2 calls forward, 2 backward" in cells


@pytest.mark.parametrize(("between", "overlapped"), [("", 0), (PRODUCT, 1)])
def test_an_all_reduce_overlaps_with_a_product_between_its_start_and_its_end(
    between, overlapped
):
    program = read_program(OVERLAP.replace("BETWEEN", between))
    assert program.all_reduces == (64,)
    assert program.overlapped == overlapped
    assert program.products == ({"f32 x f32 to f32": 1} if between else {})


def test_what_reaches_the_host_is_counted():
    program = read_program(OVERLAP.replace("BETWEEN", "%o = token[] outfeed(%y)"))
    assert program.host_copies == 1


def test_branches_are_read_as_what_runs_without_them():
    def branch(x):
        return jnp.sin(x @ x) @ x

    def conditional(p, x):
        return jax.lax.cond(p, branch, lambda x: x + 1, x)

    def switch(p, x):
        return jax.lax.switch(p.astype(int), [jnp.cos, branch, jnp.tan], x)

    x = jnp.ones((64, 64))
    plain = jax.jit(lambda p, x: branch(x)).lower(True, x).compile()
    for function in (conditional, switch):
        compiled = jax.jit(function).lower(jnp.bool_(True), x).compile()
        products = read_program(compiled.as_text()).products
        assert products == read_program(plain.as_text()).products != {}


def test_a_file_may_have_the_name_of_several_cards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rtx5091").touch()
    with pytest.raises(ConfigError, match="--target=rtx5091 is no target: device_mem"):
        targets.target_devices("rtx5091")
