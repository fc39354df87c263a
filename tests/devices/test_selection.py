"""What must happen before JAX starts, mostly each in a process of its own."""

import functools
import json
import logging
import os
import subprocess
import sys

import jax
import pytest

from haiku_template.devices import DeviceManager, selection
from haiku_template.errors import DeviceError
from jax_doctor import Finding, Machine
from jax_doctor.children import DriverResult

CAUSE = Finding("A22", "error", "the cause", "it", "this")
BESIDE = Finding("A58", "warning", "misspelt", "JAX_X", "export it")
no_card = pytest.mark.skipif(
    Machine.here().has_card(), reason="this machine has a card"
)


# Importing JAX is most of what such a process does, and starts nothing: each is forked
# from one that has imported it in the same environment.
IMPORTED = """
import json, os, sys, tempfile
from haiku_template.devices import *
for line in sys.stdin:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            try:
                exec(json.loads(line))
                sys.stdout.flush()
                os._exit(0)
            finally:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        errors.seek(0)
        texts = output.read().decode(), errors.read().decode()
        print(json.dumps([status, *texts]), flush=True)
"""


@pytest.fixture(scope="module")
def run():
    """Runs code after `from haiku_template.devices import *`; what it printed."""
    started = []

    @functools.cache
    def imported(**variables):
        process = subprocess.Popen(
            [sys.executable, "-c", IMPORTED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
        )
        started.append(process)
        return process

    def run(code, **variables):
        process = imported(**variables)
        print(json.dumps(code), file=process.stdin, flush=True)
        status, printed, errors = json.loads(process.stdout.readline())
        assert status == 0, errors
        return printed.strip()

    yield run
    for process in started:
        process.communicate(timeout=60)


def error_of(run, call, **variables):
    code = f"try: {call}\nexcept DeviceError as e: print(e)"
    return run(code, **variables)


def test_simulated_devices_exist_from_the_start(run):
    code = (
        "d = DeviceManager.create(simulate_devices=3); print(d.num_devices, d.reason)"
    )
    assert run(code) == "3 --simulate_devices=3: the CPU as several"


def test_memory_options_reach_the_variables_that_jax_reads(run):
    code = (
        "import os; d = DeviceManager.create('cpu', gpu_memory_fraction=0.5, "
        "gpu_preallocate=False); print(os.environ['XLA_CLIENT_MEM_FRACTION'], "
        "os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'], "
        "os.environ.get('XLA_PYTHON_CLIENT_MEM_FRACTION'))"
    )
    assert run(code, XLA_PYTHON_CLIENT_MEM_FRACTION=".3") == "0.5 false None"


def test_unified_memory_reaches_the_variables_and_options_of_the_client(run):
    names = "TF_FORCE_UNIFIED_MEMORY", "XLA_CLIENT_MEM_FRACTION"
    code = (
        "import os; from jaxlib.xla_client import generate_pjrt_gpu_plugin_options as o"
        "; d = DeviceManager.create('cpu', gpu_memory='unified:2.0'); "
        f"print(*[os.environ[x] for x in {names}], d.unified, "
        "o()['memory_fraction'], o()['allocator'])"
    )
    assert run(code, XLA_PYTHON_CLIENT_MEM_FRACTION=".3") == "1 2.0 2.0 2.0 bfc"


@pytest.mark.parametrize(
    "text", ["2.0", "unified", "unified:1", "unified:0.5", "unified:1e3", "managed:2"]
)
def test_what_is_no_unified_memory_is_refused(text):
    with pytest.raises(DeviceError, match="possible is unified:2.0, twice "):
        selection.parse_memory(text)


def test_unified_memory_and_a_share_are_one_too_many(run):
    code = "DeviceManager.create('cpu', gpu_memory='unified:2', gpu_memory_fraction=.5)"
    assert "give one of the two" in error_of(run, code)


def test_choosing_the_cpu_starts_no_other_backend(run):
    code = (
        "import jax; DeviceManager.create('cpu'); "
        "print(jax.config.jax_platforms, list(jax.extend.backend.backends()))"
    )
    assert run("import jax.extend\n" + code) == "cpu ['cpu']"


@pytest.mark.slow(but="tpu")
@pytest.mark.parametrize("value", ["cpu", "cpu,cuda", "tpu"])
def test_a_platform_variable_that_contradicts_the_request_is_named(run, value):
    words = error_of(run, "DeviceManager.create('gpu')", JAX_PLATFORMS=value)
    assert f"JAX_PLATFORMS={value}" in words and "unset" in words


@pytest.mark.slow(but="gpu:0,1")
@pytest.mark.parametrize("spec", ["gpu", "gpu:0,1"])
@no_card
def test_a_gpu_that_is_not_there_is_refused_before_jax_starts(run, spec):
    code = (
        "from haiku_template.devices import selection\n"
        f"try: DeviceManager.create('{spec}')\n"
        "except DeviceError as e: print(selection.backend_started(), e)"
    )
    words = run(code)
    assert words.startswith(
        f"False --device={spec} was asked for and no GPU can be used"
    )
    assert "[A20]" in words and "no /dev/nvidia0" in words and "fix: " in words


NONE_AT_ALL = "Unable to initialize backend 'cuda': no supported devices found"


@pytest.mark.parametrize(
    ("spec", "visible", "count", "words"),
    [
        ("gpu:99", "99", 1, "--device=gpu:99 names gpu:99, and there are 1: gpu:0"),
        ("gpu:5,4", "4,5", 2, "names gpu:5, and there are 2: gpu:0, gpu:1"),
        ("gpu:99", "0", 1, NONE_AT_ALL),  # The user's own variable.
        ("gpu:0", "0", 1, NONE_AT_ALL),
        ("gpu:99", "99", None, NONE_AT_ALL),
        ("gpu", "", 1, NONE_AT_ALL),
    ],
)
def test_chosen_cards_that_the_driver_does_not_count(
    monkeypatch, spec, visible, count, words
):
    options = jax.config.values | {"jax_cuda_visible_devices": visible}
    monkeypatch.setattr(type(jax.config), "values", options)
    driver = DriverResult(0, count=count)
    monkeypatch.setattr(selection.children, "probe_driver", lambda *_: driver)
    # JAX's words on a machine with one H100 of which gpu:99 is asked.
    error = selection._unavailable(selection.parse(spec), RuntimeError(NONE_AT_ALL))
    assert words in str(error)


def test_a_cpu_that_does_not_start_is_not_for_want_of_a_gpu(monkeypatch):
    monkeypatch.setattr(selection, "why_no_gpu", lambda: "there is no card")
    error = RuntimeError("Unable to initialize backend 'cpu'")
    assert str(selection._unavailable(selection.parse("cpu"), error)).endswith("'cpu'")
    no_card = str(selection._unavailable(selection.parse("gpu"), error))
    assert no_card.endswith("'cpu'; there is no card")


@no_card
def test_a_variable_that_leaves_jax_without_a_backend_is_no_assertion_error(run):
    words = error_of(run, "DeviceManager.create('auto')", JAX_PLATFORMS="cuda")
    assert "JAX cannot provide it" in words and "[A40]" in words


@pytest.mark.slow(but="auto")
@pytest.mark.parametrize("spec", ["auto", "tpu"])
def test_platforms_that_were_changed_too_late_are_named(run, spec):
    code = (
        "import jax; jax.devices(); jax.config.update('jax_platforms', 'tpu,cpu')\n"
        f"try: DeviceManager.create('{spec}')\n"
        "except DeviceError as e: print(e)\n"
        "print(DeviceManager.create('cpu').platform)"
    )
    words, platform = run(code, JAX_PLATFORMS="cpu").splitlines()
    assert f"--device={spec} was asked for" in words and words.count("[A46]") == 1
    assert "changed to 'tpu,cpu' after JAX had started on cpu" in words
    assert platform == "cpu"


@pytest.mark.slow(but="cuda-True")
@no_card
@pytest.mark.parametrize(("value", "named"), [("cuda", True), ("cuda,cpu", False)])
def test_without_a_card_a_list_that_may_have_come_in_time_is_not_blamed(
    run, value, named
):
    # JAX passes over CUDA in silence; with "cuda" alone it could not have started.
    code = (
        f"import jax; jax.devices(); jax.config.update('jax_platforms', '{value}')\n"
        "from haiku_template.devices import selection\n"
        "print(selection.ignored_platforms())"
    )
    assert ("[A46]" in run(code, JAX_PLATFORMS="cpu")) is named


@pytest.mark.slow(but="jax.devices")
@pytest.mark.parametrize("value", ["jax.devices('cpu')[0]", "'cpu'"])
def test_an_overwritten_default_device_is_named(run, value):
    code = f"import jax; jax.default_device = {value}\n"
    code += "try: DeviceManager.create('cpu')\nexcept DeviceError as e: print(e)"
    words = run(code, JAX_PLATFORMS="cpu")
    assert words.startswith("[A53]") and "with jax.default_device(device)" in words


def test_a_default_device_that_was_chosen_properly_is_not_blamed(run):
    code = (
        "import jax; jax.config.update('jax_default_device', jax.devices('cpu')[0])\n"
        "with jax.default_device(jax.devices('cpu')[0]):\n"
        "  print(DeviceManager.create('cpu').platform)"
    )
    assert run(code, JAX_PLATFORMS="cpu") == "cpu"


@pytest.mark.parametrize(
    ("found", "words"),
    [([CAUSE, BESIDE], "[A22] the cause"), ([BESIDE], "nothing is wrong outside JAX")],
)
def test_auto_on_the_cpu_beside_a_card_is_loud(monkeypatch, caplog, found, words):
    monkeypatch.setattr(Machine, "has_card", lambda machine: True)
    monkeypatch.setattr(selection, "check_environment", lambda asked: found)
    # This process did choose the CPU, which would be the cause.
    monkeypatch.setattr(selection, "only_cpu", lambda: False)
    with caplog.at_level(logging.WARNING):
        DeviceManager.create("auto")
    assert "GPU IS NOT USED" in caplog.text and words in caplog.text


@no_card
def test_auto_on_a_machine_without_a_card_is_quiet(caplog):
    with caplog.at_level(logging.WARNING):
        DeviceManager.create("auto")
    assert caplog.text == ""


UNUSED = (
    "from haiku_template.devices import selection\n"
    "from jax_doctor import Finding, Machine\n"
    "cause = Finding('A23', 'error', 'drivers differ', '580 and 570', 'reboot')\n"
    "Machine.has_card = lambda machine: True\n"
    "selection.check_environment = lambda asked: [{}]\n"
)


def test_auto_names_the_card_that_cannot_be_used(run):
    code = UNUSED.format("cause") + "print(DeviceManager.create('auto').reason)"
    words = run(code, JAX_PLATFORMS="")
    assert "no accelerator was found" not in words
    assert "this machine's GPU is not used" in words and "[A23]" in words
    words = run(code, JAX_PLATFORMS="cpu")
    assert words == "--device=auto, and JAX_PLATFORMS=cpu chooses the CPU"


@no_card
def test_a_list_of_platforms_that_falls_back_does_not_choose_the_cpu(run):
    code = "print(DeviceManager.create('auto').reason)"
    words = run(code, JAX_PLATFORMS="cuda,cpu")
    assert "chooses the CPU" not in words
    assert "no accelerator was found" in words and "JAX_PLATFORMS=cuda,cpu" in words


@pytest.mark.slow(but="auto")
@pytest.mark.parametrize("spec", ["gpu", "gpu:0", "auto"])
def test_a_gpu_that_is_asked_for_after_the_cpu_was_chosen_is_too_late(run, spec):
    code = (
        f"{UNUSED.format('')}DeviceManager.create('cpu')\n"
        f"try: print(DeviceManager.create('{spec}').reason)\n"
        "except DeviceError as e: print(e)"
    )
    words = run(code, JAX_PLATFORMS="")
    assert "nothing is wrong outside JAX" not in words
    assert "jax_platforms='cpu'" in words
    assert "first" in words or spec == "auto"


@pytest.mark.slow(but="error-gpu_memory_fraction")
@pytest.mark.parametrize("option", ["gpu_memory_fraction=0.5", "gpu_preallocate=False"])
@pytest.mark.parametrize("fallback", ["error", "cpu"])
def test_a_memory_option_that_comes_too_late_is_an_error_with_any_fallback(
    run, option, fallback
):
    code = (
        "import jax; jax.devices()\n"
        f"try: DeviceManager.create('auto', fallback='{fallback}', {option})\n"
        "except DeviceError as e: print(e)"
    )
    words = run(code, JAX_PLATFORMS="cpu")
    assert "given after JAX had started and would be ignored" in words


@pytest.mark.slow(but="cpu:1,3")
@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        ("'cpu:1,3'", "--simulate_devices=4"),
        ("'cpu', num_devices=3", "--simulate_devices=3"),
        ("'cpu', num_devices=3, simulate_devices=2", "--simulate_devices=3"),
    ],
)
def test_cpu_devices_that_are_not_there_can_be_simulated(run, asked, flag):
    words = error_of(run, f"DeviceManager.create({asked})", JAX_PLATFORMS="cpu")
    assert flag in words


AVAILABLE = """
from haiku_template.devices import available
print({name: [str(device) for device in found] for name, found in available().items()})
"""


@pytest.mark.slow(but="variables0")
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}, "['cpu:0', 'cpu:1']}"),
        ({"JAX_PLATFORMS": "cuda"}, "{}"),
        ({"JAX_PLATFORMS": "nonsense"}, "{}"),
    ],
)
def test_available_lists_devices_and_never_raises(variables, words):
    done = subprocess.run(
        [sys.executable, "-c", AVAILABLE],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | variables,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.strip().endswith(words)
    assert ("JAX cannot start" in done.stderr) == (words == "{}")
