"""Causes in the environment variables: pure strings, seen before anything starts."""

import difflib
import os
import re
import shlex

from jax_doctor.machine import GPU_NAMES, Machine
from jax_doctor.table import Facts, Sign, Signs, step, warning

cause = step("environment variables")

# The variables that JAX reads, of jax 0.10.2 to 0.12, by their kind: collected from the
# options that its sources define. A variable that JAX does not know it ignores in
# silence, and a value that it cannot read ends `import jax`.


def _names(text: str, prefix: str = "JAX_") -> frozenset[str]:
    return frozenset(prefix + name for name in text.split())


# Read without regard to case; anything that is not of TRUTH is a ValueError.
TRUTH = _names("y yes t true on 1 n no f false off 0", "")
BOOLEANS = _names("""
    ACCURATE_ERF_INV ALLOW_F16_REDUCTIONS AUTO_PCAST BCOO_CUSPARSE_LOWERING
    CHECK_STATIC_INDICES CHECK_TRACER_LEAKS COMPILATION_CACHE_CHECK_CONTENTS
    COMPILATION_CACHE_EXPECT_PGLE COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY
    COMPILER_ENABLE_REMAT_PASS CUSTOM_JVP3 CUSTOM_VJP3 DEBUG_INFS DEBUG_KEY_REUSE
    DEBUG_LEAKED_CLIENTS_ON_CLEAR_BACKENDS DEBUG_NANS DISABLE_BWD_CHECKS DISABLE_JIT
    DISABLE_MOST_OPTIMIZATIONS DISABLE_VMAP_SHMAP_ERROR DISALLOW_MESH_CONTEXT_MANAGER
    DISTRIBUTED_DEBUG DISTRIBUTED_VERIFY_SECURE_CREDENTIALS ENABLE_CHECKS
    ENABLE_COMPILATION_CACHE ENABLE_CUSTOM_PRNG ENABLE_PGLE ENABLE_PREEMPTION_SERVICE
    ENABLE_RECOVERABILITY ENABLE_X64 EXPERIMENTAL_UNSAFE_XLA_RUNTIME_ERRORS
    EXPLAIN_CACHE_MISSES EXPORT_DESERIALIZE_EXPIRED_VERSIONS
    EXPORT_IGNORE_FORWARD_COMPATIBILITY HIGH_DYNAMIC_RANGE_GUMBEL
    INCLUDE_DEBUG_INFO_IN_DUMPS INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS
    LOG_CHECKPOINT_RESIDUALS LOG_COMPILES MOSAIC_ALLOW_HLO MOSAIC_UNZIP_DEBUG_LOCATIONS
    MUTABLE_ARRAY_CHECKS NO_EXECUTION NO_TRACING PALLAS_ENABLE_DEBUG_CHECKS
    PALLAS_POISON_BUFFERS PALLAS_USE_MOSAIC_GPU PALLAS_VERBOSE_ERRORS PPRINT_USE_COLOR
    RAGGED_DOT_USE_GPU_PALLAS_TRITON_LOWERING RAGGED_DOT_USE_RAGGED_DOT_INSTRUCTION
    RAISE_ON_PPERMUTE_SORT_DIFF RAISE_PERSISTENT_CACHE_ERRORS REFS_TO_PINS REMAT3
    REMAT_BARRIER_NO_COTANGENTS REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY
    REMOVE_SIZE_ONE_MESH_AXIS_FROM_TYPE SCAN3 SHARE_BINARY_BETWEEN_HOSTS
    SOFTMAX_CUSTOM_JVP THREAD_GUARD THREEFRY_GPU_KERNEL_LOWERING THREEFRY_PARTITIONABLE
    USE_CPP_SHARD_ARGS USE_DIRECT_LINEARIZE USE_HLO_LOGISTIC_LOWERING USE_RGV3
    USE_SHARDY_PARTITIONER USE_SIMPLIFIED_JAXPR_CONSTANTS
""")
INTEGERS = _names("""
    CAPTURED_CONSTANTS_REPORT_FRAMES CAPTURED_CONSTANTS_WARN_BYTES
    COMPILATION_CACHE_MAX_SIZE COMPILER_DETAILED_LOGGING_MIN_OPS
    CPU_GET_GLOBAL_TOPOLOGY_TIMEOUT_MINUTES CPU_GET_LOCAL_TOPOLOGY_TIMEOUT_MINUTES
    EMBEDDED_CONSTANTS_MAX_BYTES EXPORT_CALLING_CONVENTION_VERSION NUM_CPU_DEVICES
    PALLAS_AUTO_ASSIGN_COLLECTIVE_IDS_LIMIT PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES
    PGLE_AGGREGATION_PERCENTILE PGLE_PROFILING_RUNS RANDOM_SEED_OFFSET
    SERIALIZATION_VERSION SHARE_BINARY_BETWEEN_HOSTS_TIMEOUT_MS
    TRACEBACK_IN_LOCATIONS_LIMIT TRACER_ERROR_NUM_TRACEBACK_FRAMES XLA_PROFILE_VERSION
""")
FLOATS = _names("""
    EXEC_TIME_OPTIMIZATION_EFFORT MEMORY_FITTING_EFFORT
    PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS
""")
# Names, lists, paths and choices.
OTHERS = _names("""
    ARRAY_GARBAGE_COLLECTION_GUARD BACKEND_TARGET CHECK_PROXY_ENVS COMPILATION_CACHE_DIR
    COORDINATOR_ADDRESS COORDINATOR_BIND_ADDRESS COORDINATOR_PORT
    CPU_COLLECTIVES_IMPLEMENTATION CPU_ENABLE_ASYNC_DISPATCH
    CROSS_HOST_TRANSFER_SOCKET_ADDRESS CROSS_HOST_TRANSFER_TIMEOUT_SECONDS
    CROSS_HOST_TRANSFER_TRANSFER_SIZE CROSS_HOST_TRANSPORT_ADDRESSES
    CUDA_VISIBLE_DEVICES DEBUG_LOG_MODULES DEFAULT_DEVICE DEFAULT_MATMUL_PRECISION
    DEFAULT_PRNG_IMPL DUMP_IR_MODES DUMP_IR_TO ERROR_CHECKING_BEHAVIOR_DIVIDE
    ERROR_CHECKING_BEHAVIOR_NAN ERROR_CHECKING_BEHAVIOR_OOB EXPLICIT_X64_DTYPES
    FORCE_DCN_CROSS_HOST_TRANSFERS HLO_SOURCE_FILE_CANONICALIZATION_REGEX
    LEGACY_PRNG_KEY LOCAL_DEVICE_IDS LOGGING_LEVEL MEMORY_FITTING_LEVEL
    MOCK_GPU_TOPOLOGY MTLS_CA_FILE MTLS_CERT_FILE MTLS_KEY_FILE MTLS_PEER_URI_PREFIX
    NUMPY_DTYPE_PROMOTION NUMPY_RANK_PROMOTION NUM_PROCESSES ONEAPI_VISIBLE_DEVICES
    OPTIMIZATION_LEVEL PALLAS_AUTO_ASSIGN_COLLECTIVE_IDS PARTITION_INDEX
    PERSISTENT_CACHE_ENABLE_XLA_CACHES PJRT_CLIENT_CREATE_OPTIONS PLATFORMS
    PLATFORM_NAME PROCESS_ID ROCM_VISIBLE_DEVICES SEND_TRACEBACK_TO_RUNTIME
    SKIP_CUDA_CONSTRAINTS_CHECK SLICE_INDEX SORT_DEVICES_BY_PROCESS_INDEX
    SOURCE_URL_SCHEMA TRACEBACK_FILTERING TRANSFER_GUARD TRANSFER_GUARD_DEVICE_TO_DEVICE
    TRANSFER_GUARD_DEVICE_TO_HOST TRANSFER_GUARD_HOST_TO_DEVICE USE_MAGMA XLA_BACKEND
""") | _names(
    """
    CLIENT_MEM_FRACTION FLAGS PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE
    PYTHON_CLIENT_ALLOCATOR PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB
    PYTHON_CLIENT_MEM_FRACTION PYTHON_CLIENT_PREALLOCATE
    PYTHON_CLIENT_USE_TFRT_GPU_CLIENT
    """,
    "XLA_",
)
ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm", "address")
GPU_NUMBERS = {
    "XLA_CLIENT_MEM_FRACTION": float,
    "XLA_PYTHON_CLIENT_MEM_FRACTION": float,
    "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB": int,
    "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE": int,
    "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": int,
}
BUILT_IN = ("cpu", "tpu", "cuda", "gpu", "proxy", "interpreter")
NO_CARD = (
    "this machine shows no NVIDIA card (no /dev/nvidia0, /dev/nvidiactl or /dev/dxg)"
)
GIVE_CARD = "give this machine or container its card (docker run --gpus all ...), or"


def _reads(kind: type, value: str) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


@cause("A51", fix="write each flag as --name=value", scope="all")
def _flags(machine: Machine, facts: Facts) -> Signs:
    """XLA_FLAGS holds a word that is no flag."""
    value = machine.environ.get("XLA_FLAGS", "").strip()
    if value and not value.startswith("-"):
        # XLA reads it as the name of a file.
        if not os.path.isfile(machine.path(value)):
            yield f"XLA_FLAGS={value} does not begin with -- and is not a file"
        return
    try:
        flags = shlex.split(value)
    except ValueError:
        yield warning(f"XLA_FLAGS={value} has an unclosed quotation mark")
        return
    for flag in flags:
        if not flag.startswith("-"):
            yield warning(f"XLA_FLAGS holds {flag!r}, which XLA ignores")


@cause(
    "A52", fix="unset it, or give true or false (a number where needed)", scope="all"
)
def _unreadable(machine: Machine, facts: Facts) -> Signs:
    """A JAX variable has a value that JAX cannot read."""
    for name, value in sorted(machine.environ.items()):
        if name in BOOLEANS and value.lower() not in TRUTH:
            yield f"{name}={value!r} is not a truth value"
        if name in INTEGERS and not _reads(int, value):
            yield f"{name}={value!r} is not a whole number"
        if name == "JAX_NUM_CPU_DEVICES" and _reads(int, value) and not int(value):
            yield f"{name}={value} asks for no device"
        if name == "JAX_DEFAULT_DEVICE" and value not in ("cpu", "gpu", "tpu"):
            text = f"{name}={value!r} is not cpu, gpu or tpu"
            yield Sign(text, f"unset {name}, or give cpu, gpu or tpu")
        if name in FLOATS and not _reads(float, value):
            yield f"{name}={value!r} is not a number"


@cause("A48", fix="unset XLA_PYTHON_CLIENT_MEM_FRACTION")
def _both_fractions(machine: Machine, facts: Facts) -> Signs:
    """The GPU memory fraction is set under both of its names."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    if all(machine.environ.get(name) for name in names):
        yield " and ".join(f"{name}={machine.environ[name]}" for name in names)


@cause("A47", fix="unset the variable, or give one of its possible values")
def _gpu_value(machine: Machine, facts: Facts) -> Signs:
    """A GPU memory variable has a value that JAX refuses."""
    allocator = machine.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    if allocator.lower() not in ALLOCATORS:
        possible = ", ".join(ALLOCATORS)
        yield f"XLA_PYTHON_CLIENT_ALLOCATOR={allocator!r}; possible are {possible}"
    for name, kind in GPU_NUMBERS.items():
        value = machine.environ.get(name, "")
        if value and not _reads(kind, value):
            yield f"{name}={value!r} is not a number"


@cause("A34", fix="set CUDA_VISIBLE_DEVICES, and no variable of JAX")
def _visible_devices(machine: Machine, facts: Facts) -> Signs:
    """Visible devices are named in a way that JAX or CUDA does not take."""
    value = machine.environ.get("JAX_CUDA_VISIBLE_DEVICES", "all")
    if value != "all" and not all(_reads(int, index) for index in value.split(",")):
        yield Sign(
            f"JAX_CUDA_VISIBLE_DEVICES={value}, and JAX's own variable takes numbers",
            "unset JAX_CUDA_VISIBLE_DEVICES, and set CUDA_VISIBLE_DEVICES instead",
        )
    value = machine.environ.get("CUDA_VISIBLE_DEVICES", "")
    if value.count("MIG-") > 1:
        text = f"CUDA_VISIBLE_DEVICES={value}: one process sees one MIG slice"
        yield warning(text, "export CUDA_VISIBLE_DEVICES=MIG-..., one of them")


@cause("A57", fix="unset JAX_SKIP_CUDA_CONSTRAINTS_CHECK", severity="warning")
def _skipped_check(machine: Machine, facts: Facts) -> Signs:
    """The check of CUDA's versions is switched off."""
    value = machine.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    if value:
        yield f"JAX_SKIP_CUDA_CONSTRAINTS_CHECK={value}"


@cause("A49", fix="export XLA_PYTHON_CLIENT_PREALLOCATE=false", severity="warning")
def _preallocate(machine: Machine, facts: Facts) -> Signs:
    """Preallocation stays on."""
    value = machine.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "")
    if value not in ("true", "True", "1", "false", "False", "0", ""):
        yield f"XLA_PYTHON_CLIENT_PREALLOCATE={value} counts as true"


@cause("A58", fix="export it under its right name", severity="warning", scope="all")
def _misspelt(machine: Machine, facts: Facts) -> Signs:
    """A variable's name is misspelled, so that it does nothing."""
    names = BOOLEANS | INTEGERS | FLOATS | OTHERS
    for name in sorted(set(machine.environ) - names):
        if name.startswith(("JAX_", "XLA_")):
            for near in difflib.get_close_matches(name, names, n=1, cutoff=0.85):
                yield f"{name} is no variable of JAX; did you mean {near}?"


def _right_platforms(machine: Machine) -> str:
    """`export JAX_PLATFORMS=cuda,cpu`; without a card, which is A42, unset it."""
    if machine.nodes():
        return "export JAX_PLATFORMS=cuda,cpu, or unset it"
    return "unset JAX_PLATFORMS, and see that this machine shows its GPU"


@cause("A44", fix=_right_platforms, scope="default")
def _spaces(machine: Machine, facts: Facts) -> Signs:
    """JAX_PLATFORMS holds a space or an empty name."""
    value = machine.environ.get("JAX_PLATFORMS", "")
    right = ",".join(filter(None, machine.platforms()))
    fix = f"export JAX_PLATFORMS={right}" if right != "cuda" else ""
    for name in value.split(",") if value else ():
        if name != name.strip() or not name:
            yield Sign(f"JAX_PLATFORMS={value!r} holds the name {name!r}", fix)


@cause("A41", fix=_right_platforms, scope="default")
def _unknown_platform(machine: Machine, facts: Facts) -> Signs:
    """JAX_PLATFORMS names a backend that JAX does not have."""
    setting = f"JAX_PLATFORMS={machine.environ.get('JAX_PLATFORMS')}"
    if "gpu" in machine.platforms():
        yield (
            f"{setting}: 'gpu' stands for cuda, rocm and oneapi together, and JAX "
            "fails on the first of them that is not installed"
        )
    # A plugin package of another maker bears the name of its platform.
    plugins = [n for n in machine.distributions if re.search("jax|xla|pjrt", n)]
    backends = {"METAL", *BUILT_IN} if "jax-metal" in plugins else {*BUILT_IN}
    backends |= {re.sub(r"\d+$", "", w) for p in plugins for w in p.split("-")}
    for name in filter(None, machine.platforms()):
        if name not in backends:
            yield f"{setting}: no backend {name!r} is installed"


@cause("A45", fix="unset JAX_PLATFORM_NAME, or JAX_DEFAULT_DEVICE", scope="all")
def _platform_name(machine: Machine, facts: Facts) -> Signs:
    """JAX_PLATFORM_NAME, deprecated, or JAX_DEFAULT_DEVICE names another platform."""
    platform, fails = facts.platform, facts.jax and not facts.jax.works()
    for variable in ("JAX_PLATFORM_NAME", "JAX_DEFAULT_DEVICE"):
        name = machine.environ.get(variable, "").lower()
        same = name in ("", platform) or (name in GPU_NAMES and platform == "gpu")
        other = platform != "auto" or not (name == "cpu" or machine.has_card())
        if not same and other:
            text = f"{variable}={name} sends arrays there, not to the {platform}"
            # A program that places its arrays needs no default device.
            needed = fails or variable == "JAX_PLATFORM_NAME"
            severity = "" if needed else "warning"
            yield Sign(text, f"unset {variable}", severity)


def hides_the_hint(machine: Machine) -> bool:
    """True if JAX_PLATFORMS=cpu hides that JAX was installed without CUDA (A02)."""
    only_cpu = machine.platforms() == ["cpu"]
    return only_cpu and bool(machine.nodes()) and not machine.has_cuda()


@cause("A43", fix=_right_platforms)
def _cpu_first(machine: Machine, facts: Facts) -> Signs:
    """JAX_PLATFORMS puts another platform before the GPU."""
    first = (machine.platforms() or [""])[0]
    if first in BUILT_IN and first not in GPU_NAMES and not hides_the_hint(machine):
        value = machine.environ["JAX_PLATFORMS"]
        yield f"JAX_PLATFORMS={value} puts {first} first, and JAX uses the first"


@cause(
    "A40",
    fix=f"{GIVE_CARD} unset JAX_PLATFORMS and ask for --device=cpu",
    scope="default",
)
def _only_cuda(machine: Machine, facts: Facts) -> Signs:
    """JAX_PLATFORMS=cuda on a machine that shows no NVIDIA card."""
    if machine.platforms() == ["cuda"] and not machine.nodes():
        yield f"JAX_PLATFORMS=cuda allows CUDA alone, and {NO_CARD}"


@cause("A42", fix=f"{GIVE_CARD} ask for --device=cpu")
def _cuda_then_cpu(machine: Machine, facts: Facts) -> Signs:
    """JAX_PLATFORMS allows another platform, and there is no card."""
    names, value = machine.platforms(), machine.environ.get("JAX_PLATFORMS")
    if names[1:] and names[0] == "cuda" and not machine.nodes():
        yield f"JAX_PLATFORMS={value} falls back to {names[1]}, because {NO_CARD}"


@cause("A56", fix='pip install -U "jax[tpu]"', scope="default")
def _no_libtpu(machine: Machine, facts: Facts) -> Signs:
    """A TPU is asked for and libtpu is not installed."""
    request = facts.platform == "tpu" or "tpu" in machine.platforms()
    installed = {"libtpu", "libtpu-nightly"} & set(machine.distributions)
    if request and not installed and not machine.environ.get("TPU_LIBRARY_PATH"):
        yield "the package libtpu is not installed"
