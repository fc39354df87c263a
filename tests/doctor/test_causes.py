"""Every cause is produced, and is named first; a healthy machine has none."""

import ast
import importlib.metadata
from pathlib import Path

import pytest
from machines import HEALTHY, jax_result

import jax_doctor
from haiku_template.doctor import ADVICE
from jax_doctor import STEPS, Facts, Machine, check_environment, children, diagnose
from jax_doctor.children import DriverResult, Stage
from jax_doctor.programs import OPTION

JETSON = ((5, 3),)
SOURCES = sorted(Path(jax_doctor.__file__).parent.rglob("*.py"))


def env(**variables):
    return lambda m: m.environ.update(variables)


def dist(**versions):
    names = {k.replace("_", "-"): v for k, v in versions.items()}

    def change(m):
        m.distributions.update(names)
        for name in [n for n, v in names.items() if v is None]:
            del m.distributions[name]

    return change


def both(*changes):
    return lambda m: [change(m) for change in changes]


def no_cuda(m):
    for name in [n for n in m.distributions if n.startswith(("jax-cuda", "nvidia-"))]:
        del m.distributions[name]


def amd(m, may_write=True):
    no_cuda(m)
    m.file("/sys/class/kfd/kfd/topology/nodes/1/properties", "simd_count 256\n")
    m.file("/dev/kfd")
    m.fields["may_write"] = lambda path: may_write


def wsl(m):
    m.remove("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
    m.file("/dev/dxg")


def old_nvjitlink(m):
    m.file("/opt/cuda/libnvJitLink.so.13.0.10")
    m.link("/opt/cuda/libnvJitLink.so.13", "libnvJitLink.so.13.0.10")
    m.environ["LD_LIBRARY_PATH"] = "/opt/cuda"


def conda(m):
    no_cuda(m)
    m.file("/conda-meta/jaxlib-0.12.0-cpu_py312h1_0.json", "{}")
    m.fields["conda_meta"] = m.root / "conda-meta"


def maps(m):
    m.file(
        "/proc/self/maps",
        "7f r-xp 0 00:1 1 /usr/lib/x86_64-linux-gnu/libcublas.so.13\n",
    )


def answer(code, name="", **more):
    return {"driver": DriverResult(code, name, **more)}


def failed_start(errors, returncode=1):
    return {"driver": HEALTHY, "jax": jax_result(returncode=returncode, errors=errors)}


def ran(*problems, returncode=0, unfinished="", errors=""):
    stages = tuple(Stage(name, "cuda:0", problem) for name, problem in problems)
    how = {"returncode": returncode, "errors": errors, "unfinished": unfinished}
    jax = jax_result("gpu", "cpu", stages=stages, **how)
    return {"driver": HEALTHY, "jax": jax}


def sums(problem="", **how):
    stage = Stage("a sum in bfloat16", "cpu:0", problem)
    return jax_result("cpu", stages=(stage,), **how)


WRONG_SUM = sums("wrong values: [nan] and not [6.]")
UNTRIED_SUM = sums("Unknown backend: 'gpu' requested")
NO_CHOICE = 'ValueError: Invalid value "no" for JAX flag jax_transfer_guard'
CRASHED_SUM = sums(returncode=-11, unfinished="a sum of seven axes")
DNN = "FAILED_PRECONDITION: DNN library initialization failed."
BARE, CARD = "plain", "gpu"
# id, machine, what is wrong with it, and what the children reported.
ERRORS = [
    ("A01", CARD, no_cuda, {}),
    ("A01", CARD, both(no_cuda, env(JAX_PLATFORMS="cuda,cpu")), {}),
    ("A01", CARD, dist(jax_cuda13_pjrt=None), {}),
    ("A02", CARD, both(no_cuda, env(JAX_PLATFORMS="cpu")), {}),
    ("A03", CARD, dist(jax_cuda13_plugin="0.11.0"), {}),
    ("A03", CARD, dist(jax_cuda13_pjrt="0.11.0"), {}),
    ("A04", CARD, dist(jaxlib="0.9.0"), {}),
    ("A04", CARD, dist(jaxlib="0.13.0"), {}),
    ("A05", CARD, dist(jaxlib=None), {}),
    ("A05", BARE, dist(jax=None, jaxlib=None), {"spec": "cpu"}),
    ("A06", CARD, dist(nvidia_cudnn_cu13=None), {}),
    ("A06", CARD, lambda m: m.remove("/site/site-packages/nvidia/x/lib/libcudnn.so.9"),
     {}),
    ("A06", CARD, lambda m: m.remove("/site/site-packages/nvidia/x/lib/libcublasLt.so."
                                     "13"), {}),
    ("A06", CARD, dist(nvidia_cuda_cupti=None), {}),
    ("A06", CARD, None, failed_start("RuntimeError: Unable to load cuDNN. Is it "
                                     "installed?")),
    ("A06", CARD, None, failed_start("Invalid handle. Cannot load symbol "
                                     "cudnnGetVersion", returncode=-6)),
    ("A06", CARD, None, failed_start("", returncode=-7)),
    ("A07", CARD, old_nvjitlink, {}),
    ("A08", CARD, dist(nvidia_cudnn_cu13="9.1.0.70"), {}),
    ("A08", CARD, None, failed_start("Outdated cuDNN installation found.\nVersion JAX "
                                     "was built against: 91000\nInstalled version: 9")),
    ("A09", CARD, None, ran(("matmul", ""), ("convolution", DNN))),
    ("A10", CARD, dist(jax_cuda12_plugin="0.12.0", jax_cuda12_pjrt="0.12.0"), {}),
    ("A11", CARD, dist(jax_cuda13_plugin=None), {}),
    ("A12", CARD, None, failed_start("Jax plugin configuration error: Plugin module %s "
                                     "could not be loaded\nImportError: triton")),
    ("A13", CARD, both(dist(jax="0.4.30", jaxlib="0.4.30", dm_haiku="0.0.13"),
                       lambda m: m.fields.update(requires={})), {}),
    ("A13", BARE, None, {"jax": jax_result(returncode=-11), "spec": "cpu"}),
    ("A14", CARD, conda, {}),
    ("A15", CARD, lambda m: m.fields.update(python=(3, 11, 9)), {}),
    ("A15", CARD, dist(numpy="1.26.4"), {}),
    ("A17", CARD, None, ran(("matmul", "INTERNAL: libdevice not found"))),
    ("A18", CARD, None, failed_start("INVALID_ARGUMENT: Mismatched PJRT plugin PJRT "
                                     "API version (0.47) and framework PJRT API")),
    ("A19", CARD, dist(dm_haiku="0.0.13"), {}),
    ("A20", BARE, None, {}),
    ("A20", BARE, lambda m: m.pci(), {}),
    ("A20", BARE, lambda m: m.cuda(), {}),
    ("A20", BARE, env(NVIDIA_VISIBLE_DEVICES="all"), {}),
    ("A21", CARD, None, answer(303, problem="libcuda.so.1: cannot open")),
    ("A21", CARD, None, answer(303, "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED")),
    ("A22", CARD, env(CUDA_VISIBLE_DEVICES=""), {}),
    ("A22", CARD, env(CUDA_VISIBLE_DEVICES="-1"), {}),
    ("A22", CARD, env(CUDA_VISIBLE_DEVICES="3"), {}),
    ("A22", CARD, None, answer(100, "CUDA_ERROR_NO_DEVICE")),
    ("A23", CARD, None, answer(803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")),
    ("A24", CARD, None, answer(804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE")),
    ("A25", CARD, None, answer(802, "CUDA_ERROR_SYSTEM_NOT_READY")),
    ("A26", CARD, None, answer(999, "CUDA_ERROR_UNKNOWN")),
    ("A26", CARD, None, answer(None, problem="no answer within 5 s")),
    ("A38", CARD, None, answer(46, "CUDA_ERROR_DEVICE_UNAVAILABLE")),
    ("A39", CARD, None, answer(304, "CUDA_ERROR_OPERATING_SYSTEM")),
    ("A59", CARD, None, answer(805, "CUDA_ERROR_MPS_CONNECTION_FAILED")),
    ("A61", CARD, None, answer(2, "CUDA_ERROR_OUT_OF_MEMORY")),
    ("A110", CARD, None, answer(101, "CUDA_ERROR_INVALID_DEVICE")),
    ("A27", CARD, None, answer(34, "CUDA_ERROR_STUB_LIBRARY")),
    ("A28", CARD, None, answer(0, version=13000, count=0)),
    ("A29", CARD, None, answer(0, version=12040, count=1)),
    ("A31", CARD, None, answer(0, version=13000, count=1, capabilities=JETSON)),
    ("A31", CARD, None, ran(returncode=-6, unfinished="matmul")),
    ("A32", CARD, None, answer(100, refused=(("/dev/nvidia0", "not permitted"),))),
    ("A33", CARD, wsl, answer(100, library="/usr/lib/x86_64-linux-gnu/libcuda.so.1")),
    ("A34", CARD, env(JAX_CUDA_VISIBLE_DEVICES="MIG-1b2c"), {}),
    ("A35", BARE, amd, {}),
    ("A35", BARE, lambda m: amd(m, may_write=False), {}),
    ("A36", BARE, dist(jax_metal="0.1.1"), {"spec": "auto"}),
    ("A37", CARD, None, ran(("matmul", "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"))),
    ("A40", BARE, env(JAX_PLATFORMS="cuda"), {}),
    ("A41", CARD, env(JAX_PLATFORMS="gpu"), {}),
    ("A41", CARD, env(JAX_PLATFORMS="CUDA"), {}),
    ("A41", CARD, env(JAX_PLATFORMS="cuda13"), {}),
    ("A41", CARD, env(JAX_PLATFORMS="cud"), {}),
    ("A42", BARE, env(JAX_PLATFORMS="cuda,cpu"), {}),
    ("A43", CARD, env(JAX_PLATFORMS="cpu,cuda"), {}),
    ("A43", CARD, env(JAX_PLATFORMS="cpu"), {}),
    ("A44", CARD, env(JAX_PLATFORMS="cuda, cpu"), {}),
    ("A44", CARD, env(JAX_PLATFORMS="cuda,"), {}),
    ("A44", BARE, env(JAX_PLATFORMS="tpu, cpu"), {"spec": "tpu"}),
    ("A45", BARE, env(JAX_PLATFORM_NAME="gpu"), {"spec": "cpu"}),
    ("A45", CARD, env(JAX_PLATFORM_NAME="cpu"), {}),
    ("A47", CARD, env(XLA_PYTHON_CLIENT_ALLOCATOR="bogus"), {}),
    ("A47", CARD, env(XLA_CLIENT_MEM_FRACTION="half"), {}),
    ("A48", CARD, env(XLA_CLIENT_MEM_FRACTION=".5",
                      XLA_PYTHON_CLIENT_MEM_FRACTION=".5"), {}),
    ("A50", CARD, env(XLA_FLAGS="--xla_gpu_bogus=1"),
     failed_start("F... Unknown flag in XLA_FLAGS: --xla_gpu_bogus=1")),
    ("A51", CARD, env(XLA_FLAGS="xla_foo=1"), {}),
    ("A51", CARD, env(XLA_FLAGS=300 * "x"), {}),
    ("A52", CARD, env(JAX_ENABLE_X64="maybe"), {}),
    ("A52", BARE, env(JAX_NUM_CPU_DEVICES="eight"), {"spec": "cpu"}),
    ("A52", BARE, env(JAX_NUM_CPU_DEVICES="0"), {"spec": "cpu"}),
    ("A52", BARE, env(JAX_DEFAULT_DEVICE="cpu:0"), {"spec": "cpu"}),
    ("A56", BARE, None, {"spec": "tpu"}),
    ("A56", BARE, env(JAX_PLATFORMS="tpu,cpu"), {"spec": "auto"}),
    ("A60", CARD, env(JAX_TRANSFER_GUARD="no"), failed_start(NO_CHOICE)),
    ("A61", CARD, None, ran(("matmul", "RESOURCE_EXHAUSTED: Out of memory"))),
    ("A63", CARD, None, ran(("convolution", DNN), errors="Memory usage: 1048576 bytes "
                            "free, 85899345920 bytes total.")),
    ("A90", CARD, None, ran(("round trip", "wrong values: [0. 0.] and not [1. 2.]"))),
    ("A120", BARE, None, {"jax": WRONG_SUM, "spec": "cpu"}),
    ("A120", BARE, None, {"jax": CRASHED_SUM, "spec": "auto"}),
    ("A121", CARD, None, ran(("square root", "wrong values: [0.] and not [22.627]"))),
    ("A00", CARD, None, {"driver": HEALTHY, "jax": jax_result("cpu")}),
]  # fmt: skip
WARNINGS = [
    ("A06", CARD, dist(nvidia_cusolver=None), {}),
    ("A06", CARD, dist(nvidia_cuda_nvrtc=None), {}),
    ("A07", CARD, both(lambda m: m.file("/opt/cuda/libcublas.so.13"),
                       env(LD_LIBRARY_PATH="/opt/cuda")), {}),
    ("A16", CARD, maps, {}),
    ("A17", CARD, dist(nvidia_cuda_nvcc=None), {}),
    ("A17", CARD, lambda m: m.fields.update(ptxas=lambda: "12.4"), {}),
    ("A19", CARD, dist(jaxline="0.0.8"), ran(("matmul", ""))),
    ("A21", CARD, lambda m: m.remove("/usr/lib/x86_64-linux-gnu/libcuda.so.1"), {}),
    ("A24", CARD, both(lambda m: m.file("/usr/local/cuda/compat/libcuda.so.1"),
                       env(LD_LIBRARY_PATH="/usr/local/cuda/compat")), {}),
    ("A26", CARD, lambda m: m.remove("/dev/nvidia-uvm"), {}),
    ("A30", CARD, dist(nvidia_cuda_nvcc="13.1.80"), {"driver": HEALTHY}),
    ("A32", CARD, None, answer(0, version=13000, count=1, nvml=18)),
    ("A34", CARD, env(CUDA_VISIBLE_DEVICES="MIG-1,MIG-2"), {}),
    ("A45", CARD, env(JAX_DEFAULT_DEVICE="cpu"), {}),
    ("A49", CARD, env(XLA_PYTHON_CLIENT_PREALLOCATE="off"), {}),
    ("A51", CARD, env(XLA_FLAGS="--xla_a=1 xla_b=1"), {}),
    # The loader may find another libcuda.so.1; the driver's answer decides.
    ("A23", CARD, lambda m: m.driver("580.95.05", library="570.86.10"), {}),
    ("A27", CARD, both(lambda m: m.file("/cuda/lib64/stubs/libcuda.so.1"),
                       env(LD_LIBRARY_PATH="/cuda/lib64/stubs")), {}),
    ("A29", CARD, lambda m: m.driver("535.104.05"), {}),
    ("A33", CARD, wsl, {}),
    ("A57", CARD, env(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"), {}),
    ("A58", CARD, env(JAX_PLATFORM="cuda"), {}),
    ("A108", CARD, both(lambda m: m.file("/dev/nvidia1"), dist(nvidia_nccl_cu13=None)),
     {}),
    ("A120", BARE, None, {"jax": jax_result("cpu"), "sums": WRONG_SUM, "spec": "cpu"}),
]  # fmt: skip


def found_on(request, fixture, change, facts):
    machine = request.getfixturevalue(fixture)
    if change:
        change(machine)
    return diagnose(machine.machine(), Facts(**facts))


@pytest.mark.parametrize(
    ("id_", "fixture", "change", "facts"), ERRORS, ids=[row[0] for row in ERRORS]
)
def test_each_cause_is_named_first(request, id_, fixture, change, facts):
    found = found_on(request, fixture, change, facts)
    assert (found[0].id, found[0].severity) == (id_, "error"), found
    assert found[0].found and found[0].fix
    if fixture == CARD:  # One thing is wrong, and one thing is reported.
        errors = [finding.id for finding in found if finding.severity == "error"]
        assert errors == [id_]


@pytest.mark.parametrize(
    ("id_", "fixture", "change", "facts"), WARNINGS, ids=[row[0] for row in WARNINGS]
)
def test_each_warning_is_alone(request, id_, fixture, change, facts):
    found = found_on(request, fixture, change, facts)
    assert [(finding.id, finding.severity) for finding in found] == [(id_, "warning")]


def test_flags_may_be_in_a_file_of_this_folder(gpu, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "flags.txt").write_text("--xla_cpu_enable_fast_math=false")
    gpu.environ["XLA_FLAGS"] = "flags.txt"
    assert not diagnose(gpu.machine(), Facts())
    (here / "flags.txt").unlink()
    assert [finding.id for finding in diagnose(gpu.machine(), Facts())] == ["A51"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_path_is_asked_for_in_a_way_that_raises(path):
    """Of folders of other users, and of names that are too long; os.path does not."""
    raises = {"exists", "is_dir", "is_file"}
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.Attribute) and node.attr in raises) or (
            ast.unparse(node.value) == "os.path"
        ), f"{path}:{node.lineno}"


@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "XLA_FLAGS"])
def test_a_name_that_is_too_long_is_no_error_of_the_doctor(gpu, name):
    gpu.environ[name] = 5000 * "x"
    assert {f.id for f in diagnose(gpu.machine())} <= {"A51"}


def test_the_matrix_covers_the_table():
    table = {cause.id for causes in STEPS.values() for cause in causes}
    assert table == {row[0] for row in ERRORS + WARNINGS}
    assert len({row[0] for row in ERRORS + WARNINGS}) >= 45


@pytest.mark.parametrize("asked", ["gpu", "auto", "cpu", "gpu:0"])
def test_a_healthy_card_has_no_findings(gpu, asked):
    jax = jax_result("gpu", "cpu")
    assert diagnose(gpu.machine(), Facts(asked)) == []
    assert diagnose(gpu.machine(), Facts(asked, HEALTHY, jax)) == []


@pytest.mark.parametrize("asked", ["cpu", "auto"])
def test_a_healthy_machine_without_a_card_has_no_findings(plain, asked):
    assert check_environment(asked, plain.machine()) == []
    assert diagnose(plain.machine(), Facts(asked, jax=jax_result("cpu"))) == []


def test_what_mends_a_wrong_sum_is_not_what_is_there_already(plain):
    facts = Facts("cpu", jax=CRASHED_SUM)
    (found,) = diagnose(plain.machine(), facts)
    assert found.fix == f'export XLA_FLAGS="$XLA_FLAGS {OPTION}=-reduce"'
    assert found.found == "jaxlib 0.12.0 is wrong in a sum of seven axes (a crash)"
    plain.environ["XLA_FLAGS"] = f"{OPTION}=-reduce"
    (found,) = diagnose(plain.machine(), facts)
    assert "another version of jaxlib" in found.fix


def test_a_sum_that_cannot_be_tried_is_not_wrong(plain):
    plain.environ["JAX_DEFAULT_DEVICE"] = "gpu"
    (found,) = diagnose(plain.machine(), Facts("cpu", jax=UNTRIED_SUM))
    assert (found.id, found.severity) == ("A45", "error")
    assert found.fix == "unset JAX_DEFAULT_DEVICE"
    (found,) = diagnose(plain.machine(), Facts("cpu", jax=jax_result("cpu")))
    assert (found.id, found.severity) == ("A45", "warning")


def test_flags_that_are_set_stay_beside_the_one_that_mends_sums(plain):
    plain.environ["XLA_FLAGS"] = "--xla_a=1"
    (found,) = diagnose(plain.machine(), Facts("cpu", jax=WRONG_SUM))
    follow(plain, found.fix)
    assert plain.environ["XLA_FLAGS"] == f"--xla_a=1 {OPTION}=-reduce"
    facts = Facts("cpu", jax=jax_result("cpu"), sums=WRONG_SUM)
    (found,) = diagnose(plain.machine(), facts)
    assert found.fix == f"keep {OPTION}=-reduce in XLA_FLAGS"


def test_what_is_left_of_a_package_is_none(tmp_path, monkeypatch):
    left = tmp_path / "left/jaxlib-0.4.30.dist-info/.nfs0001"
    left.parent.mkdir(parents=True)
    left.touch()
    version = importlib.metadata.version("jaxlib")
    monkeypatch.syspath_prepend(tmp_path / "left")
    assert Machine.here().version("jaxlib") == version
    assert check_environment("cpu") == []


def test_commands_are_silent_about_jaxline_which_they_may_not_need(gpu):
    gpu.distributions["jaxline"] = "0.0.8"
    assert check_environment("cpu", gpu.machine()) == []
    (found,) = diagnose(gpu.machine(), Facts("cpu", jax=jax_result("cpu")))
    assert (found.id, found.severity) == ("A19", "warning")
    assert "jax.tree_map = jax.tree.map" in found.fix
    assert ADVICE[found.fix].startswith("python -m haiku_template.compat SCRIPT ARGS")
    assert "jax.tree_map and jax.device_put_sharded, which jax 0.1" in found.found


def test_a_local_cuda_needs_no_wheels(gpu):
    for name in [n for n in gpu.distributions if n.startswith("nvidia-")]:
        del gpu.distributions[name]
    assert diagnose(gpu.machine())[0].id == "A06"
    gpu.file("/usr/local/cuda/lib64/libcudart.so.13")
    assert diagnose(gpu.machine()) == []


@pytest.mark.parametrize(
    ("marker", "ids"),
    [
        ("", ["A15"]),
        ('; python_version <= "3.12"', ["A15"]),
        ('; python_version >= "3.13"', []),
        ('; python_version < "3.12"', []),
        ("; python_version == '3.12' and extra == 'tests'", []),
    ],
)
def test_a_requirement_counts_for_its_python_and_extra_alone(gpu, marker, ids):
    gpu.fields["requires"] = {"jax": (f"numpy>=2.4{marker}",)}
    assert [finding.id for finding in diagnose(gpu.machine())] == ids


def test_the_cuda_build_of_conda_is_cuda(gpu):
    no_cuda(gpu)
    gpu.file("/conda-meta/jaxlib-0.12.0-cuda129py312h1_0.json", "{}")
    gpu.fields["conda_meta"] = gpu.root / "conda-meta"
    assert diagnose(gpu.machine()) == []


@pytest.mark.parametrize("id_", ["A01", "A03", "A22", "A43"])
def test_beside_an_unused_card_faults_are_warnings(gpu, id_):
    change = next(row[2] for row in ERRORS if row[0] == id_)
    change(gpu)
    found = diagnose(gpu.machine(), Facts("auto"))
    assert (found[0].id, found[0].severity) == (id_, "warning")
    assert diagnose(gpu.machine(), Facts("cpu")) == []


def test_a_card_that_auto_does_not_use_is_a_warning(gpu):
    words = "RuntimeError: Unable to load cuDNN. Is it installed?"
    for errors, id_ in ((words, "A06"), ("", "A00")):
        jax = jax_result("cpu", errors=errors)
        found = diagnose(gpu.machine(), Facts("auto", HEALTHY, jax))
        assert [(f.id, f.severity) for f in found] == [(id_, "warning")]


def test_a_card_that_auto_uses_and_that_fails_is_an_error(gpu):
    facts = Facts("auto", **ran(("matmul", ""), ("convolution", DNN)))
    found = diagnose(gpu.machine(), facts)
    assert [(f.id, f.severity) for f in found] == [("A09", "error")]


@pytest.mark.parametrize(
    ("returncode", "words"),
    [(None, "more than 1 s"), (1, "unheard of"), (-6, "by SIGABRT: OSError: unheard")],
)
def test_what_no_row_explains_is_said_in_jax_s_words(plain, returncode, words):
    jax = jax_result(returncode=returncode, errors="Traceback\nOSError: unheard of")
    found = diagnose(plain.machine(), Facts("cpu", jax=jax))
    assert [finding.id for finding in found] == ["A00"] and words in found[0].found


@pytest.mark.parametrize(
    "words",
    [
        "ModuleNotFoundError: No module named 'jax.numpy'; 'jax' is not a package",
        "AttributeError: partially initialized module 'jax' has no attribute 'jit'",
    ],
)
def test_a_file_that_hides_a_package_is_to_be_renamed(
    plain, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    facts = Facts("cpu", jax=jax_result(returncode=1, errors=words))
    assert words in diagnose(plain.machine(), facts)[0].found
    (tmp_path / "jax.py").touch()
    (finding,) = diagnose(plain.machine(), facts)
    assert finding.found.startswith(f"{tmp_path / 'jax.py'} is imported in place")
    assert finding.fix == "rename this file"


# As jax 0.12.0.1 says it, whose last line names the wrong cause.
LOG = """\
Jax plugin configuration error: Exception when calling \
jax_plugins.xla_cuda12.initialize()
Traceback (most recent call last):
  File "jax/_src/xla_bridge.py", line 520, in discover_pjrt_plugins
    plugin_module.initialize()
RuntimeError: jaxlib/cuda/versions_helpers.cc:{}
An NVIDIA GPU may be present on this machine, but a CUDA-enabled jaxlib is not \
installed. Falling back to cpu.
"""


@pytest.mark.parametrize(
    ("words", "id_"),
    [
        ("CUDA_ERROR_STUB_LIBRARY", "A27"),
        ("CUDA_ERROR_NO_DEVICE", "A22"),
        ("Unknown CUDA error 303; cuGetErrorName failed. This probably", "A21"),
        ("CUDA_ERROR_SYSTEM_NOT_READY", "A25"),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "A23"),
        ("CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "A24"),
        ("CUDA_ERROR_UNKNOWN", "A26"),
        ("CUDA_ERROR_OUT_OF_MEMORY", "A61"),
        ("CUDA_ERROR_DEVICE_UNAVAILABLE", "A38"),
        ("CUDA_ERROR_INVALID_DEVICE", "A110"),
        ("CUDA_ERROR_OPERATING_SYSTEM", "A39"),
        ("CUDA_ERROR_MPS_SERVER_NOT_READY", "A59"),
    ],
)
def test_what_the_driver_answered_to_jax_alone_is_its_cause_too(gpu, words, id_):
    errors = LOG.format(f"135: operation cuInit(0) failed: {words}")
    jax = jax_result("cpu", errors=errors)
    for driver in (None, HEALTHY):
        facts = Facts("gpu", driver, jax)
        assert [f.id for f in diagnose(gpu.machine(), facts)] == [id_]
    # What the driver answered to us goes first.
    asked = DriverResult(802, "CUDA_ERROR_SYSTEM_NOT_READY")
    assert diagnose(gpu.machine(), Facts("gpu", asked, jax))[0].id == "A25"


def test_jax_that_counts_no_card_is_the_driver_counting_none(gpu):
    words = "FAILED_PRECONDITION: No visible GPU devices. (you may need to uninstall"
    jax = jax_result(returncode=1, errors=f"RuntimeError: 'cuda': {words}")
    assert diagnose(gpu.machine(), Facts("gpu", HEALTHY, jax))[0].id == "A28"


@pytest.mark.parametrize("asked", ["gpu", "auto"])
def test_the_plugin_s_own_words_are_quoted_and_not_jax_s_guess(gpu, asked):
    errors = LOG.format("113: operation gpuDeviceGetAttribute failed: CUDA_ERROR_OTHER")
    jax = jax_result("cpu", errors=errors)
    (found,) = diagnose(gpu.machine(), Facts(asked, HEALTHY, jax))
    assert found.id == "A00" and "gpuDeviceGetAttribute" in found.found
    assert "CUDA-enabled jaxlib" not in found.found


def test_a_fix_brings_what_is_missing(gpu):
    def fix(change):
        change(gpu)
        return diagnose(gpu.machine())[0].fix

    # pip does not see that a file is missing: -U would do nothing.
    library = "/site/site-packages/nvidia/x/lib/libcudnn_graph.so.9"
    again = "pip install --force-reinstall --no-deps nvidia-cudnn-cu13==9.15.0.57"
    assert fix(lambda m: m.remove(library)) == again
    package = fix(dist(nvidia_cudnn_cu13=None))
    assert package == 'pip install -U "jax[cuda13]==0.12.0"'
    # The half that is there says which CUDA: the other one's plugin would make two.
    twelve = both(no_cuda, dist(jax_cuda12_plugin="0.12.0"))
    assert '"jax[cuda12]==0.12.0"' in fix(twelve) and gpu.machine().kernel_driver()


def test_of_two_cudas_the_one_goes_that_lacks_its_wheels_or_its_driver(gpu):
    def fix():
        return diagnose(gpu.machine())[0].fix

    dist(jax_cuda12_plugin="0.12.0", jax_cuda12_pjrt="0.12.0")(gpu)
    gpu.fields["requires"]["jax-cuda12-plugin"] = ("nvidia-cublas-cu12",)
    assert fix() == "pip uninstall -y jax-cuda12-plugin jax-cuda12-pjrt"
    dist(nvidia_cublas_cu12="12.9", nvidia_cublas=None)(gpu)
    assert fix() == "pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt"
    dist(nvidia_cublas="13.1")(gpu)
    assert "cuda12" in fix()
    gpu.driver("570.86.10")
    assert "cuda13" in fix()


def test_a_library_of_a_toolkit_stands_in_for_a_wheel_s(gpu):
    gpu.remove("/site/site-packages/nvidia/x/lib/libcupti.so.13")
    assert diagnose(gpu.machine())[0].id == "A06"
    gpu.file("/usr/local/cuda/lib64/libcupti.so.13")
    assert diagnose(gpu.machine()) == []


def test_loaded_wheels_of_this_environment_are_no_other_framework(gpu):
    site = gpu.root / "lib/python3.12/dist-packages"
    gpu.fields["site_packages"] = (*gpu.fields["site_packages"], site)
    library = gpu.file("/lib/python3.12/dist-packages/nvidia/cublas/libcublas.so.13")
    line = f"7f r-xp 0 00:1 1 /{library.relative_to(gpu.root)}\n"
    gpu.file("/proc/self/maps", line)
    assert diagnose(gpu.machine()) == []


def test_only_this_environment_s_own_wheels_are_not_foreign(gpu):
    def seen(folder):
        gpu.environ["LD_LIBRARY_PATH"] = folder
        return [finding.id for finding in diagnose(gpu.machine())]

    assert seen("/site/site-packages/nvidia/x/lib") == []
    gpu.file("/other/site-packages/nvidia/x/lib/libnvJitLink.so.13")
    assert seen("/other/site-packages/nvidia/x/lib") == ["A07"]
    gpu.file("/usr/local/nvidia/lib64/libcudadebugger.so.1")  # The driver's own.
    assert seen("/usr/local/nvidia/lib64") == []


def follow(m, fix):
    """Does what a fix says with variables and packages."""
    for command in fix.partition(", or ")[0].split("; "):
        words = command.replace(",", " ").split()
        if words[0] == "unset":
            m.environ.pop(words[1], None)
        elif words[0] == "export":
            name, value = command.split(maxsplit=1)[1].split("=", 1)
            old = m.environ.get(name, "")
            m.environ[name] = value.strip('"').replace(f"${name}", old).strip()
        elif command.startswith("pip uninstall -y"):
            for name in words[3:]:
                m.distributions.pop(name, None)
        elif '"jax[cuda13]' in command:
            m.cuda()
        elif '"jax[cuda12]' in command:
            for part in ("plugin", "pjrt"):
                m.distributions[f"jax-cuda12-{part}"] = m.distributions["jaxlib"]


PLATFORMS = ["cpu", "cpu,cuda", "gpu", "CUDA", "cuda", "cuda,cpu", "cuda, cpu", "cuda,"]
FIXED = ERRORS + [
    ("A4", fixture, env(JAX_PLATFORMS=value), {"spec": asked})
    for fixture in (BARE, CARD)
    for asked in ("gpu", "auto", "tpu")
    for value in (*PLATFORMS, "tpu, cpu", "cpu,tpu")
]


@pytest.mark.parametrize(
    ("id_", "fixture", "change", "facts"), FIXED, ids=[row[0] for row in FIXED]
)
def test_the_fix_of_a_cause_does_not_make_the_next_cause(
    request, id_, fixture, change, facts
):
    found = found_on(request, fixture, change, facts)
    if not found:
        return
    m = request.getfixturevalue(fixture)
    follow(m, found[0].fix)
    before, after = (
        {f.id for f in each} for each in (found, diagnose(m.machine(), Facts(**facts)))
    )
    assert after <= before, f"{found[0]} brought {after - before}"


def test_a_library_that_only_begins_like_one_of_cuda_s_is_not_blamed(gpu):
    for name in ("libcurl.so.4", "libcups.so.2", "libcudf.so", "libcue.so.2"):
        gpu.file(f"/opt/conda/lib/{name}")
    gpu.environ["LD_LIBRARY_PATH"] = "/opt/conda/lib"
    assert diagnose(gpu.machine()) == []
    words = "RuntimeError: Unable to load cuDNN. Is it installed?"
    assert diagnose(gpu.machine(), Facts(**failed_start(words)))[0].id == "A06"
    gpu.file("/opt/conda/lib/libcusparseLt.so.0")
    assert diagnose(gpu.machine())[0].id == "A07"


def test_a_platform_is_known_by_its_plugin_and_not_by_any_package(gpu):
    gpu.environ["JAX_PLATFORMS"] = "nvidia"
    assert diagnose(gpu.machine())[0].id == "A41"
    gpu.environ["JAX_PLATFORMS"] = "iree"
    gpu.distributions["iree-pjrt-plugin-cuda"] = "1.0"
    assert "A41" not in [f.id for f in diagnose(gpu.machine())]


def test_consequences_come_after_the_cause(plain):
    plain.environ["JAX_PLATFORMS"] = "cuda, cpu"
    assert [f.id for f in diagnose(plain.machine())] == ["A44", "A42", "A20"]


def test_known_variables_are_no_misspellings(plain):
    plain.environ.update(JAX_TRACEBACK_FILTERING="off", JAX_MY_OWN="1", XLA_FLAGS="")
    assert check_environment("cpu", plain.machine()) == []


def test_the_driver_is_not_asked_after_an_error(gpu, monkeypatch):
    def refuse(*args):
        raise AssertionError("asked")

    monkeypatch.setattr(children, "probe_driver", refuse)
    gpu.environ["CUDA_VISIBLE_DEVICES"] = ""
    assert check_environment("gpu", gpu.machine())[0].id == "A22"
    del gpu.environ["CUDA_VISIBLE_DEVICES"]
    with pytest.raises(AssertionError, match="asked"):
        check_environment("gpu", gpu.machine())
    assert check_environment("cpu", gpu.machine()) == []
