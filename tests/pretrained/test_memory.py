"""Reading a gigabyte holds little more than the parameters in memory."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
# One tensor of 307 MB, and twenty of 34 MB that are transposed.
SHAPES = {"embed": (75_000, 1024)} | {f"w{i}": (1024, 8192) for i in range(20)}
CHILD = """
import re, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_platforms", "cpu")
from haiku_template.devices import DeviceManager
from haiku_template.models import Rule
from haiku_template.pretrained import restore

def status(key):
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\\s+(\\d+) kB", text)[1]) * 1024

def init():
    matrices = {f"w{i}": jnp.zeros((8192, 1024), sys.argv[2]) for i in range(20)}
    return {"a": {"embed": jnp.zeros((75_000, 1024), sys.argv[2])}, "b": matrices}

rules = [Rule("embed", "a/embed"), Rule("w{}", "b/w{}", "transpose")]
devices = DeviceManager.create("cpu", num_devices=1)
jax.block_until_ready(devices.replicate(np.ones(3)))
before = status("VmRSS")
params = restore(sys.argv[1], init, rules, devices)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print((status("VmHWM") - before - size) / 1e6, size / 1e6)
"""


def write_large(path):
    """The file without ever holding it: 978 MB of float32."""
    header, first = {}, 0
    for name, shape in SHAPES.items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape}
        header[name]["data_offsets"] = [first, first + size]
        first += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = np.random.default_rng(0).random(2**20, np.float32).tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while first:
            first -= file.write(block[:first])


@pytest.mark.long
def test_a_gigabyte_is_read_with_little_more_than_its_parameters(tmp_path):
    path = tmp_path / "model.safetensors"
    write_large(path)
    try:
        for dtype, size in (("float32", 978.3), ("bfloat16", 489.1)):
            printed = subprocess.run(
                [sys.executable, "-c", CHILD, path, dtype],
                cwd=ROOT,
                check=True,
                timeout=120,
                capture_output=True,
                text=True,
            ).stdout
            above, parameters = map(float, printed.split())
            assert abs(parameters - size) < 1
            assert above < 150, f"{above} MB above the parameters, for {dtype}"
            # What is read of the file counts here too, twice: 4 MB of it at a time.
            assert above < 50
    finally:
        path.unlink()
