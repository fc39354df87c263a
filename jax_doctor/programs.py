"""Programs that children run: JAX's devices, and operations whose values are known.

This process never imports JAX. Each line that a child writes is JSON: what JAX shows,
then, before and after each operation, what is computed.
"""

# What switches off the sums that jaxlib gets wrong on CPUs.
OPTION = "--xla_cpu_experimental_ynn_fusion_type"
# Sums that XLA gave to YNNPACK and got wrong: jax issues 39103, 39257 and 40412. That
# of seven axes, which crashed, comes last.
# Why: docs/decisions/doctor.md#known-values
SUMS = ("a sum for each of 32769 rows", "a sum in bfloat16", "a sum of seven axes")
# Operations that gave wrong values on some cards: jax issues 40633 and 39486. One by
# one, and in this order: the values of the one were seen in the next.
OPERATIONS = ("square root", "addition", "normal draw", "reduction", "softmax")
OPERATIONS += ("matmul", "convolution")
COMMON = f"""
import json, sys
import jax
import jax.numpy as jnp
import numpy as np

def say(*values):
    print(json.dumps(values), flush=True)

def check(x, expected):
    x = np.asarray(x, np.float32)
    if x.shape != expected.shape or not np.allclose(x, expected, rtol=1e-2):
        i = ~np.isclose(x, expected, rtol=1e-2)
        raise ValueError(f"wrong values: {{x[i][:4]}} and not {{expected[i][:4]}}")

def attempt(operation, device, function):
    say("start", operation)
    try:
        function()
        say("end", operation, str(device), "")
    except Exception as error:
        say("end", operation, str(device), str(error) or type(error).__name__)

def sums(device):
    rng = np.random.default_rng(0)
    matrix, rows = rng.random((3, 3), np.float32), rng.random((32769, 3), np.float32)
    each = jax.jit(jax.vmap(lambda x, m: jnp.sum((m @ x) ** 2), (0, None)))
    attempt({SUMS[0]!r}, device,
            lambda: check(each(rows, matrix), ((rows @ matrix.T) ** 2).sum(1)))

    def layer(x, kernel, mean, stride):
        x = jax.lax.conv_general_dilated(
            x, kernel.astype(jnp.bfloat16), (stride, stride), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu((x.astype(jnp.float32) - mean).astype(jnp.bfloat16))

    @jax.jit
    def network(x, first, second, mean):
        x = layer(layer(x.astype(jnp.bfloat16), first, mean, 2), second, mean, 1)
        return jnp.sum(x.astype(jnp.float32), (1, 2))

    shapes = (16, 8, 8, 16), (1, 1, 16, 32), (1, 1, 32, 32), (32,)
    eighths = [np.full(shape, 0.125, np.float32) for shape in shapes]
    attempt({SUMS[1]!r}, device,
            lambda: check(network(*eighths), np.full((16, 32), 6, np.float32)))
    a, b = rng.random((2, 3, 1, 2, 2, 8, 8, 8), np.float32)
    inner = jax.jit(lambda a, b: jnp.sum(a * b, axis=3))
    attempt({SUMS[2]!r}, device, lambda: check(inner(a, b), (a * b).sum(3)))
"""
ASK_SUMS = COMMON + "\nsay('devices', 1)\nsums(jax.devices()[0])\n"
ASK_JAX = (
    COMMON
    + """
from jax.extend import backend

rows = []
for name, client in backend.backends().items():
    for device in client.local_devices():
        stats = device.memory_stats() or {}
        rows.append([name, device.platform, device.id, device.device_kind,
                     stats.get("bytes_in_use"), stats.get("bytes_limit")])
say("shown", rows, jax.default_backend())
platform, indices = sys.argv[1], [int(i) for i in sys.argv[2].split(",") if i]
try:
    devices = jax.local_devices(backend=None if platform == "auto" else platform)
except RuntimeError:
    sys.exit()  # It is not there, as was just said.
if indices and max(indices) >= len(devices):
    sys.exit()
devices = [devices[i] for i in indices] or devices

# Whole numbers that float32, bfloat16 and TF32 hold exactly.
left = (np.arange(64 * 64) % 7).reshape(64, 64).astype(np.float32)
right = (np.arange(64 * 64) % 5).reshape(64, 64).astype(np.float32)
image, kernel = left.reshape(1, 1, 64, 64), np.ones((1, 1, 3, 3), np.float32)
padded = np.pad(left, 1)
window = sum(padded[i:i + 64, j:j + 64] for i in range(3) for j in range(3))
shares = np.exp(left) / np.exp(left).sum(1, keepdims=True)

def moments():
    draw = np.asarray(jax.random.normal(jax.random.key(0), (4096,)))
    near = np.abs([draw.mean(), draw.std() - 1]) < 0.1
    check(near, np.ones(2, np.float32))

convolve = jax.jit(lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"))
reduce = jax.jit(lambda x, y: jnp.sum(x * y, axis=1))
say("devices", len(devices))
for device in devices:
    put = lambda x: jax.device_put(x, device)
    with jax.default_device(device):
        attempt("round trip", device, lambda: check(jax.device_get(put(left)), left))
        attempt("square root", device,
                lambda: check(jnp.sqrt(512.0), np.sqrt(np.float32(512))))
        attempt("addition", device,
                lambda: check(jnp.ones(4) + 1, np.full(4, 2, np.float32)))
        attempt("normal draw", device, moments)
        attempt("reduction", device,
                lambda: check(reduce(put(left), put(right)), (left * right).sum(1)))
        attempt("softmax", device, lambda: check(jax.nn.softmax(put(left)), shares))
        attempt("matmul", device,
                lambda: check(jax.jit(jnp.matmul)(put(left), put(right)), left @ right))
        attempt("convolution", device,
                lambda: check(convolve(put(image), put(kernel))[0, 0], window))
first = devices[0]
for device in devices[1:]:
    def there_and_back():
        far = jax.device_put(jax.device_put(left, first), device)
        check(jax.device_get(far), left)
        check(jax.device_get(jax.device_put(far + 1, first)), left + 1)
    attempt("between devices", device, there_and_back)
if len(devices) > 1:
    rows = np.arange(len(devices) * 4, dtype=np.float32).reshape(len(devices), 4)
    add = jax.pmap(lambda x: jax.lax.psum(x, "i"), "i", devices=devices)
    attempt("psum", f"{len(devices)} devices",
            lambda: check(add(rows)[0], rows.sum(0)))
if first.platform == "cpu":
    sums(first)
"""
)
