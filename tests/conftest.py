import functools
import gc
import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

# Tests compile many programs that others have compiled: of one model, say, the same
# first parameters, and in each process again. JAX keeps them, for this process and for
# those that it starts. Another worker has a folder of its own: JAX does not write its
# entries at once, and who reads half of one is warned.
COMPILED = tempfile.TemporaryDirectory(prefix="compiled-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

# A `make` that a test calls is not part of the one that runs the tests, whose words
# (`LATER=` of .ci/run) it would take for its own.
for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
    os.environ.pop(name, None)

# Under nohup, and in the background of a script, these are ignored, and so by all that
# tests start and send them to.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src import compiler  # noqa: E402

# Before any backend exists: the tests' devices are CPUs that look like eight.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Here programs run for a few steps and would compile for minutes in all. Processes that
# tests start, and tests that ask for `optimized`, compile as users do; with 0 all do.
QUICK = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") != "0"
jax.config.update("jax_disable_most_optimizations", QUICK)


def compile_options(*args, _made=compiler.get_compile_options, **kwargs):
    """With few optimizations, XLA's older emitters in one thread take half as long."""
    options = _made(*args, **kwargs)
    debug = options.executable_build_options.debug_options
    if debug.xla_backend_optimization_level == 0:
        # Why: docs/decisions/tests.md#emitters
        quick = [("xla_cpu_parallel_codegen_split_count", 1)]
        if jax.__version_info__ < (0, 11):  # Later it is no option.
            quick.append(("xla_cpu_use_fusion_emitters", False))
        options.env_option_overrides = [*options.env_option_overrides, *quick]
    return options


compiler.get_compile_options = compile_options

from haiku_template import signals  # noqa: E402
from haiku_template.devices import DeviceManager  # noqa: E402
from haiku_template.reporting import plots, report  # noqa: E402
from haiku_template.runs import stopping  # noqa: E402
from tests.runs import UNDRAWN, run_command  # noqa: E402

# Files that take minutes begin first: one of them at the end has one worker at work.
LONGEST = (
    *("training/test_exact.py", "test_notebooks.py", "training/test_fit.py"),
    *("storage/test_damages.py", "training/test_layouts.py", "test_signals.py"),
    *("storage/test_each_operation.py", "training/test_runs_of_calls.py"),
    *("test_sweep.py", "training/test_tokens_run.py", "test_docs.py", "test_new.py"),
    *("test_program_cache.py", "storage/test_bounded.py", "text/test_packed.py"),
    *("ports/test_ports.py", "test_xla_flags.py", "storage/test_patches.py"),
)
PLACES = {str(Path(__file__).parent / name): i for i, name in enumerate(LONGEST)}
# Functions that took a second and a half or more. Why: docs/decisions/tests.md#heavy
HEAVY = frozenset((Path(__file__).parent / "heavy.txt").read_text().split())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """`slow(but="four devices")`: the cases with these words in their id are quick."""
    items.sort(key=lambda item: PLACES.get(str(item.path), len(PLACES)))
    quick, several = set(), set()  # Functions: with a quick case, with others.
    for item in items:
        if item.nodeid.partition("[")[0] in HEAVY:
            item.add_marker("heavy")
        marks = [mark for mark in item.own_markers if mark.name == "slow"]
        # In brackets, as pytest prints them: `[7` is no 37, and `[float16` no bfloat16.
        words = [mark.kwargs["but"] for mark in marks if mark.kwargs]
        if any(x in f"[{item.callspec.id}]" for x in words):
            item.own_markers = [m for m in item.own_markers if m not in marks]
            quick.add(item.nodeid.partition("[")[0])
        elif words:
            several.add(item.nodeid.partition("[")[0])
    config.without_quick_case = sorted(several - quick)


def pytest_collection_finish():
    """Spares the collector, which JAX's tracing calls often, what stays to the end."""
    gc.collect()
    gc.freeze()  # Why: docs/decisions/tests.md#frozen


@pytest.fixture(scope="session", autouse=True)
def no_report():
    """Drawing report.png takes longer than most runs of tests, here and in commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "plots", SimpleNamespace(write=lambda *_: None))
        patch.setenv("PYTHONPATH", UNDRAWN)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_forced_end():
    """A signal in a test's own process would end all of its worker's on a slow machine.

    Commands that tests start keep their limits, which tests/test_blocked.py tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals, "PATIENCE", 3600.0)
        patch.setattr(stopping, "FORCE_SECONDS", 3600.0)
        yield


@pytest.fixture
def optimized():
    """For a test whose numbers should be those of the programs that users run."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", QUICK)


@pytest.fixture
def with_report(monkeypatch):
    """For a test that looks at report.png."""
    monkeypatch.setattr(report, "plots", plots)


@pytest.fixture(params=[1, 4], ids=["one device", "four devices"])
def devices(request):
    return DeviceManager.create("cpu", num_devices=request.param)


@pytest.fixture
def one_device():
    return DeviceManager.create("cpu", num_devices=1)


@pytest.fixture
def four_devices():
    return DeviceManager.create("cpu", num_devices=4)


@pytest.fixture(scope="session")
def command():
    """Runs a command of the package, `command(name, *flags)`, on one CPU."""
    return functools.partial(run_command, JAX_PLATFORMS="cpu")
