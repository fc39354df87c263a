"""Which implementation of attention is chosen, by data: no GPU is needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_template.errors import ConfigError
from haiku_template.models.attention import Hardware, attend, choose

CPU = Hardware("cpu", "")
TURING = Hardware("PJRT C API\ncuda 12090", "7.5")
AMPERE = Hardware("PJRT C API\ncuda 12090", "8.0")
BLACKWELL = Hardware("PJRT C API\ncuda 13000", "12.0")
AMD = Hardware("PJRT C API\nrocm 60200", "gfx90a")


@pytest.mark.parametrize(
    ("hardware", "dtype", "head_size", "obstacle"),
    [
        (AMPERE, jnp.bfloat16, 64, None),
        (AMPERE, jnp.float16, 128, None),
        (BLACKWELL, jnp.bfloat16, 8, None),
        (CPU, jnp.bfloat16, 64, "there is no NVIDIA GPU"),
        (AMD, jnp.bfloat16, 64, "there is no NVIDIA GPU"),
        (TURING, jnp.float16, 64, "compute capability 7.5, below 8.0"),
        (AMPERE, jnp.float32, 64, "bfloat16 or float16, and the model in float32"),
        (AMPERE, jnp.bfloat16, 60, "heads of size 60 are not a multiple of 8"),
        (AMPERE, jnp.bfloat16, 256, "heads of size 256 .* up to 128"),
    ],
)
def test_cudnn_is_chosen_where_it_exists(hardware, dtype, head_size, obstacle):
    arguments = (hardware, dtype, head_size)
    assert choose("auto", *arguments) == ("xla" if obstacle else "cudnn")
    assert choose("xla", *arguments) == "xla"
    if obstacle is None:
        assert choose("cudnn", *arguments) == "cudnn"
        return
    with pytest.raises(ConfigError, match=f"attention=cudnn.*{obstacle}") as error:
        choose("cudnn", *arguments)
    assert error.value.exit_code == 64


def test_this_machine_s_cpu_is_no_gpu():
    hardware = Hardware.current()
    assert hardware.capability == "" and "cuda" not in hardware.runtime


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("masked", [False, True])
def test_half_precision_is_computed_on_the_cpu_too(dtype, masked):
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 5, 2, 8))
    mask = np.tri(5, dtype=bool)[None, None] if masked else None
    exact = attend("auto", *(jnp.float32(x) for x in (query, key, value)))
    inputs = (jnp.asarray(x, dtype) for x in (query, key, value))
    outputs = jax.jit(attend, static_argnums=0)("auto", *inputs, mask)
    assert outputs.dtype == dtype
    np.testing.assert_allclose(np.float32(outputs), exact, atol=0.03)
