"""What JAX's real CUDA plugin says without a GPU, and whether it is read right.

`make test-cuda-wheels` alone runs this: it installs jax[cuda12], 6 GB. Each fault is
made with real files and diagnosed twice: by the doctor, and from JAX's words alone.
"""

import shlex
from ctypes.util import find_library

import pytest
from environments import library, wheel

from haiku_template.xla_flags import FLAG
from jax_doctor import Machine
from jax_doctor.libraries import NEEDED, NEEDED_LATER

pytestmark = pytest.mark.cuda_wheels
JAX = Machine.here().distributions.get("jax", "")
# What stands behind the last check that the plugin makes of its libraries.
PAST_THE_LIBRARIES = "gpuDeviceGetAttribute"


@pytest.mark.parametrize(
    ("code", "id_", "said"),
    [
        (2, "A61", "A61"),
        (34, "A27", "A27"),
        (46, "A38", "A38"),
        (100, "A22", "A22"),
        (101, "A110", "A110"),
        (303, "A21", "A21"),
        (304, "A39", "A39"),
        (802, "A25", "A25"),
        (803, "A23", "A23"),
        (804, "A24", "A24"),
        (999, "A26", "A26"),
    ],
)
def test_each_code_of_the_driver(whole, code, id_, said):
    report = whole.doctor(STUB_CUINIT=str(code))
    assert report["cause"]["id"] == id_ and f" {code}," in report["cause"]["found"]
    assert [finding["id"] for finding in report["findings"]] == [id_]
    found, _, words = whole.words(STUB_CUINIT=str(code))
    assert found == said and "operation cuInit(0) failed" in words


def test_a_driver_that_counts_no_devices(whole):
    assert whole.doctor(STUB_COUNT="0")["cause"]["id"] == "A28"
    assert whole.words(STUB_COUNT="0")[0] == "A28"


@pytest.mark.skipif(bool(find_library("cuda")), reason="this machine has a driver")
def test_no_driver(whole, tmp_path):
    absent = {"LD_LIBRARY_PATH": str(tmp_path)}
    report = whole.doctor(**absent)
    assert report["cause"]["id"] == "A21" and "303" in report["cause"]["found"]
    found, _, words = whole.words(**absent)
    assert found == "A21" and "Unknown CUDA error 303" in words


def test_a_healthy_set_has_no_fault_up_to_the_driver(whole):
    report = whole.doctor()
    results = {row["check"]: row["result"] for row in report["checks"]}
    assert results["environment variables"] == f"XLA_FLAGS={FLAG}"  # The package's.
    for part in ("plugin", "pjrt"):
        assert f"jax-cuda12-{part} {JAX}" in results["installed packages"]
    assert results["card and driver files"] == "/dev/nvidia0"
    assert "1 device" in results["the driver's answer"]
    # The stub is no card: the plugin ends at it, and its own words are quoted.
    (finding,) = report["findings"]
    assert finding["id"] == "A00" and PAST_THE_LIBRARIES in finding["found"]


def names(libraries):
    return [name for group in libraries.values() for name in group]


@pytest.mark.parametrize("name", names(NEEDED))
def test_without_this_library_the_plugin_does_not_start(broken, name):
    broken.shell("rm", library(name))
    cause = broken.doctor()["cause"]
    assert cause["id"] == "A06" and name in cause["found"]
    found, _, words = broken.words()
    assert found == "A06" and PAST_THE_LIBRARIES not in words


@pytest.mark.parametrize("name", names(NEEDED_LATER))
def test_without_this_library_it_starts(broken, name):
    broken.shell("rm", library(name))
    report = broken.doctor()
    warnings = [f for f in report["findings"] if f["severity"] == "warning"]
    assert [finding["id"] for finding in warnings] == ["A06"]
    assert (
        name in warnings[0]["found"] and PAST_THE_LIBRARIES in report["cause"]["found"]
    )
    assert PAST_THE_LIBRARIES in broken.words()[2]


def test_a_library_that_is_cut_short(broken):
    broken.shell("truncate", "--size=20000", library("libcublas.so"))
    cause = broken.doctor()["cause"]
    assert cause["id"] == "A06" and "bus error" in cause["found"]


def test_a_library_older_than_the_plugin_needs(broken):
    old = wheel("nvidia-cuda-runtime-cu12", "12.0.146")
    broken.pip("install", "--no-deps", old)
    cause = broken.doctor()["cause"]
    assert cause["id"] == "A08" and "12.0.146" in cause["found"]
    found, sentence, _ = broken.words()
    assert found == "A08" and sentence.startswith("CUDA 12000 is older")


def test_a_foreign_library_in_the_library_path(whole, tmp_path):
    old = wheel("nvidia-nvjitlink-cu12", "12.0.140")
    whole.pip("install", "--no-deps", "--target", tmp_path, old)
    folder = f"{tmp_path}/nvidia/nvjitlink/lib"
    both = {"LD_LIBRARY_PATH": f"{whole.folder}/driver:{folder}"}
    report = whole.doctor(**both)
    assert report["cause"]["id"] == "A07" and folder in report["cause"]["found"]
    assert report["cause"]["fix"] == "unset LD_LIBRARY_PATH"
    found, _, words = whole.words(**both)
    assert found == "A07" and "Unable to load cuSPARSE" in words


def mend(environment, fix):
    """Does what the doctor said."""
    program, *arguments = shlex.split(fix)
    assert program == "pip"
    environment.pip(*arguments)
    (finding,) = environment.doctor()["findings"]
    assert finding["id"] == "A00" and PAST_THE_LIBRARIES in finding["found"]


@pytest.mark.parametrize(
    ("half", "id_", "words"),
    [
        ("pjrt", "A01", "jax-cuda12-plugin without jax-cuda12-pjrt"),
        ("plugin", "A11", "jax-cuda12-pjrt is installed without jax-cuda12-plugin"),
    ],
)
def test_half_a_plugin_is_completed_by_the_fix(broken, half, id_, words):
    broken.pip("uninstall", "--yes", f"jax-cuda12-{half}")
    cause = broken.doctor()["cause"]
    assert cause["id"] == id_ and words in cause["found"]
    mend(broken, cause["fix"])


def test_a_library_that_is_gone_is_brought_back_by_the_fix(broken):
    broken.shell("rm", library("libcupti.so"))
    mend(broken, broken.doctor()["cause"]["fix"])


def test_a_plugin_of_another_version_is_replaced_by_the_fix(broken):
    broken.pip("install", "--no-deps", wheel("jax-cuda12-plugin", "0.10.1"))
    cause = broken.doctor()["cause"]
    assert cause["id"] == "A03" and "jax-cuda12-plugin 0.10.1" in cause["found"]
    assert "0.10.1 is installed, but it is not compatible" in broken.words()[2]
    mend(broken, cause["fix"])


def test_of_two_plugins_the_fix_removes_the_one_without_libraries(broken):
    for part in ("plugin", "pjrt"):
        broken.pip("install", "--no-deps", wheel(f"jax-cuda13-{part}", JAX))
    cause = broken.doctor()["cause"]
    assert cause["id"] == "A10"
    mend(broken, cause["fix"])


def test_a_script_and_a_run_are_told_the_same(whole, tmp_path):
    def create(spec):
        code = (
            "from haiku_template.devices import DeviceManager, DeviceError\n"
            f"try: print(DeviceManager.create('{spec}').platform)\n"
            "except DeviceError as error: print(error)"
        )
        return whole.run("-c", code, STUB_CUINIT="803")

    words = create("gpu").stdout
    assert "[A23]" in words and "cuInit(0)" in words
    auto = create("auto")
    assert auto.stdout == "cpu\n"
    assert "GPU IS NOT USED" in auto.stderr and "[A23]" in auto.stderr
    train = ("-m", "haiku_template.train", "--config=configs/digits.py")
    train += (f"--workdir={tmp_path / 'run'}", "--device=gpu")
    done = whole.run(*train, STUB_CUINIT="803")
    assert done.returncode == 69 and "[A23]" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_platforms_that_were_changed_too_late_beside_a_card(whole):
    code = (
        "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()\n"
        "jax.config.update('jax_platforms', 'cuda,cpu')\n"
        "from haiku_template.devices import DeviceManager\n"
        "DeviceManager.create('auto')"
    )
    done = whole.run("-c", code)
    assert "[A46] jax_platforms was changed to 'cuda,cpu'" in done.stderr
