"""The programs that ask JAX, as texts: children run them, this process never does.

Each writes JSON lines on standard output; the last line of the first is its answer,
the second writes a line before and after each operation.
"""

DEVICES = """
import json, re, sys
import jax
from jax.extend import backend
found = []
for name, client in backend.backends().items():
    for device in client.local_devices():
        stats = device.memory_stats() or {}
        found.append([name, device.platform, device.id, device.device_kind,
                      stats.get("bytes_in_use"), stats.get("bytes_limit")])
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
libraries = sorted(set(re.findall(r"(/\\S*/lib(?:cu|nv)\\w+\\.so\\S*)", maps)))
print(json.dumps([found, jax.default_backend(), libraries]))
"""

OPERATIONS = """
import json, sys
import numpy as np
import jax, jax.numpy as jnp
platform = sys.argv[1]
devices = jax.local_devices(backend=None if platform == "auto" else platform)
chosen = [int(i) for i in sys.argv[2].split(",") if i]
devices = [devices[i] for i in chosen] or devices

def say(*words):
    print(json.dumps(words), flush=True)

def check(got, wanted):
    got = np.asarray(got)
    if got.shape != wanted.shape or not np.allclose(got, wanted, rtol=1e-2):
        found, true = got.ravel()[:4], wanted.ravel()[:4]
        raise ValueError(f"wrong values: {found} and not {true}")

def attempt(operation, device, function):
    say("start", operation, str(device))
    try:
        function()
        say("end", operation, str(device), "")
    except Exception as error:
        say("end", operation, str(device), str(error) or type(error).__name__)

# Whole numbers that float32, bfloat16 and TF32 hold exactly.
left = (np.arange(64 * 64) % 7).reshape(64, 64).astype(np.float32)
right = (np.arange(64 * 64) % 5).reshape(64, 64).astype(np.float32)
image = left.reshape(1, 64, 64, 1)
kernel = np.ones((3, 3, 1, 1), np.float32)
padded = np.pad(left, 1)
sums = sum(padded[i:i + 64, j:j + 64] for i in range(3) for j in range(3))

def convolve(x, k):
    return jax.lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

say("devices", len(devices))
for device in devices:
    put = lambda x: jax.device_put(x, device)
    attempt("round trip", device, lambda: check(jax.device_get(put(left)), left))
    attempt("matmul", device,
            lambda: check(jax.jit(jnp.matmul)(put(left), put(right)), left @ right))
    attempt("convolution", device, lambda: check(
        jax.jit(convolve)(put(image), put(kernel)), sums.reshape(1, 64, 64, 1)))
first = devices[0]
for device in devices[1:]:
    def there_and_back():
        far = jax.device_put(jax.device_put(left, first), device)
        check(jax.device_get(far), left)
        check(jax.device_get(jax.device_put(far + 1, first)), left + 1)
    attempt("between devices", device, there_and_back)
if len(devices) > 1:
    parts = np.arange(len(devices) * 4, dtype=np.float32).reshape(len(devices), 4)
    add = jax.pmap(lambda x: jax.lax.psum(x, "i"), "i", devices=devices)
    attempt("psum", f"{len(devices)} devices",
            lambda: check(add(parts)[0], parts.sum(0)))
"""
