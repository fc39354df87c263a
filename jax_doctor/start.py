"""Causes that show only when JAX starts or computes, and whatever is left over.

The wording of JAX changes between releases: a text alone is never the proof, only
together with how the child ended and with what the machine showed.
"""

import os
import re
import sys

from jax_doctor.children import Child, JaxResult, Stage
from jax_doctor.libraries import with_wheels
from jax_doctor.machine import Machine, numbers
from jax_doctor.programs import OPERATIONS, OPTION, SUMS
from jax_doctor.table import OTHERWISE, Facts, Sign, Signs, step, warning

cause = step("JAX and its devices")
otherwise = step(OTHERWISE)

NO_DNN = "DNN library initialization failed|(Loaded runtime CuDNN library: .*)"
DAMAGED = r"CUDA_ERROR_(?:ILLEGAL_ADDRESS|ECC_\w+|LAUNCH_FAILED)"
CROSSING = ("between devices", "psum")
NO_CHOICE = r'Invalid value "(.*)" for JAX flag (jax_\w+)'
CHOOSE = "unset it, or give a value of docs.jax.dev/en/latest/config_options.html"
WRONG_VALUES = "wrong values"
READ_ON = "run with TF_CPP_MIN_LOG_LEVEL=0 and read what JAX says at its start"


@cause("A50", fix="drop the flag from XLA_FLAGS", scope="all")
def _unknown_flag(machine: Machine, facts: Facts) -> Signs:
    """XLA_FLAGS holds a flag that this version does not know."""
    flag = facts.said_at_start(machine, r"Unknown flags? in XLA_FLAGS: (\S+)")
    if flag and flag[1].split("=")[0] in machine.environ.get("XLA_FLAGS", ""):
        yield f"XLA_FLAGS holds {flag[1]}, and the process ends without a traceback"


@cause("A12", fix="align the versions of jax, jaxlib and the plugin")
def _old_plugin_import(machine: Machine, facts: Facts) -> Signs:
    """A plugin of JAX cannot be imported."""
    if facts.said_at_start(machine, r"Plugin module .* could not be loaded"):
        reason = facts.said_at_start(machine, r"ImportError: .*")
        yield reason[0] if reason else "JAX does not say why"


@cause("A60", fix=CHOOSE, scope="all")
def _no_choice(machine: Machine, facts: Facts) -> Signs:
    """A JAX variable has none of its possible values."""
    words = facts.jax.child.errors if facts.jax and not facts.jax.devices else ""
    if match := re.search(NO_CHOICE, words):
        yield f"{match[2].upper()}={match[1]!r}"


@cause("A18", fix="align the versions; pip uninstall -y jax-metal")
def _interface(machine: Machine, facts: Facts) -> Signs:
    """A plugin speaks another version of JAX's interface."""
    if match := facts.said_at_start(machine, r"PJRT API version \(\S+\).*"):
        yield match[0]


@cause("A09", fix=with_wheels)
def _cudnn(machine: Machine, facts: Facts) -> Signs:
    """The cuDNN that was loaded does not fit the one JAX was built with."""
    match = re.search(NO_DNN, facts.problems())
    if match and not _no_memory_for_cudnn(machine, facts):
        yield match[1] or "the convolution could not start cuDNN"


@cause("A63", fix="export XLA_CLIENT_MEM_FRACTION=0.5")
def _no_memory_for_cudnn(machine: Machine, facts: Facts) -> Signs:
    """No memory is left for cuDNN."""
    errors = facts.problems()
    # As XLA logs it.
    memory = re.search(r"(\d+) bytes free, (\d+) bytes total", errors)
    if memory and re.search(NO_DNN, errors) and int(memory[1]) <= int(memory[2]) / 20:
        yield f"cuDNN found {memory[1]} of {memory[2]} bytes free"


@cause("A37", fix="restart from the last checkpoint on another card; dmesg | grep Xid")
def _poisoned(machine: Machine, facts: Facts) -> Signs:
    """The card's memory or program is damaged."""
    for word in re.findall(DAMAGED, facts.problems()):
        yield f"an operation ended in {word}"


@cause("A120", fix=f'export XLA_FLAGS="$XLA_FLAGS {OPTION}=-reduce"', scope="all")
def _wrong_sums(machine: Machine, facts: Facts) -> Signs:
    """This jaxlib miscomputes sums on CPUs."""
    jaxlib = f"jaxlib {machine.version('jaxlib')}"
    has_flag = f"{OPTION}=-reduce" in machine.environ.get("XLA_FLAGS", "")
    if wrong := _wrong(facts.jax):
        fix = "pip install another version of jaxlib" if has_flag else ""
        yield Sign(f"{jaxlib} is wrong in {wrong}", fix)
    if wrong := _wrong(facts.sums):
        fix = f"keep {OPTION}=-reduce in XLA_FLAGS" if has_flag else ""
        yield warning(f"without this flag {jaxlib} is wrong in {wrong}", fix)


def _wrong(jax: JaxResult | None) -> str:
    """Names the sums whose values were wrong, or in which a child crashed."""
    if jax is None:
        return ""
    end = "a crash" if jax.child.returncode is not None else "without an end"
    ended = [*jax.failures(), Stage(jax.unfinished, "", end)]
    # An error is none of the arithmetic's: a sum could not be tried.
    odd = (WRONG_VALUES, end)
    wrong = [x for x in ended if x.operation in SUMS and x.problem.startswith(odd)]
    return "; ".join(f"{stage.operation} ({stage.problem})" for stage in wrong)


@cause(
    "A121",
    fix='pip install another version of JAX, such as "jax[cuda13]==0.10.2"; jax issues '
    "40633 and 39486",
)
def _wrong_values(machine: Machine, facts: Facts) -> Signs:
    """This jaxlib miscomputes on this GPU."""
    for stage in facts.jax.failures() if facts.problems() and facts.on_gpu() else ():
        if stage.operation in OPERATIONS and stage.problem.startswith(WRONG_VALUES):
            yield f"{stage.operation} on {stage.device}: {stage.problem}"


@cause(
    "A19",
    fix="put them back before jaxline is imported, such as jax.tree_map = jax.tree.map",
    severity="warning",
    scope="all",
)
def _jaxline(machine: Machine, facts: Facts) -> Signs:
    """The installed jaxline calls functions that JAX removed."""
    jax = machine.version("jax")
    # Said by the doctor alone: commands do not ask JAX, and may need no jaxline.
    if facts.jax and "jaxline" in machine.distributions and numbers(jax) >= (0, 6):
        also = " and jax.device_put_sharded" * (numbers(jax) >= (0, 10))
        yield f"jaxline calls jax.tree_map{also}, which jax {jax} lacks"


@cause(
    "A90",
    fix="export NCCL_P2P_DISABLE=1; in the BIOS switch ACS off, or boot with iommu=pt",
)
def _broken_copies(machine: Machine, facts: Facts) -> Signs:
    """Copies between devices lose their values."""
    jax = facts.jax
    if not facts.problems() or not facts.on_gpu():
        return
    for stage in jax.failures():
        copies = stage.operation not in OPERATIONS
        if copies and stage.problem.startswith(WRONG_VALUES):
            yield f"{stage.operation} on {stage.device}: {stage.problem}"
    if jax.unfinished in CROSSING and jax.child.returncode is None:
        yield f"{jax.unfinished} did not end within {jax.child.seconds:.0f} s"


def _plugin_error(child: Child) -> str:
    """Error that kept JAX's plugin from starting; empty if there was none.

    JAX logs it, and says after it, wrongly, that no CUDA-enabled jaxlib is installed.
    """
    _, failure, text = child.errors.rpartition("Jax plugin configuration error")
    errors = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", text, re.MULTILINE)
    return f": {errors[-1]}" if failure and errors else ""


@otherwise("A00", fix="ask for one of these", scope="all")
def _absent_index(machine: Machine, facts: Facts) -> Signs:
    """A device that was asked for does not exist."""
    platform, most = facts.platform, max(facts.indices, default=0)
    devices = facts.jax.devices if facts.jax else ()
    count = sum(device.platform == platform for device in devices)
    if 0 < count <= most:
        names = ", ".join(f"{platform}:{i}" for i in range(count))
        text = f"{platform}:{most} was asked for, and there are {names}"
        simulate = f"ask for one of these, or export JAX_NUM_CPU_DEVICES={most + 1}"
        yield Sign(text, simulate if platform == "cpu" else "")


@otherwise("A00", fix="rename this file", scope="all")
def _hidden_package(machine: Machine, facts: Facts) -> Signs:
    """A file hides a package of the same name."""
    hidden = r"(?:\w'; |partially initialized module )'(\w+)"
    match = facts.said_at_start(machine, hidden)
    for folder in ("", *sys.path) if match else ():
        file = os.path.abspath(os.path.join(folder, f"{match[1]}.py"))
        if os.path.isfile(file):
            yield f"{file} is imported in place of the package {match[1]}"


@otherwise("A00", fix=READ_ON, scope="all")
def _run_failed(machine: Machine, facts: Facts) -> Signs:
    """The test run failed."""
    jax = facts.jax
    if not facts.reached() or jax.works():
        return
    end = f"ended with code {jax.child.returncode}"
    if jax.child.returncode is None:
        end = f"was stopped after {jax.child.seconds:.0f} s"
    place = f" in {jax.unfinished}" if jax.unfinished else ""
    errors = [f"{s.operation} on {s.device}: {s.problem}" for s in jax.failures()]
    yield f"the test run {end}{place}: {'; '.join(errors) or jax.child.last_words()}"


@otherwise("A00", fix=READ_ON, scope="all")
def _start_failed(machine: Machine, facts: Facts) -> Signs:
    """JAX does not show the device."""
    if not facts.jax or facts.reached():
        return
    child = facts.jax.child
    if child.returncode is None:
        yield f"starting JAX took more than {child.seconds:.0f} s and was stopped"
    if child.returncode != 0:
        yield f"JAX does not start: {child.last_words()}"
    backends = ", ".join(sorted({device.backend for device in facts.jax.devices}))
    text = f"JAX started with {backends or 'nothing'}, without {facts.platform}"
    yield text + _plugin_error(child)


@otherwise("A00", fix=READ_ON)
def _card_unused(machine: Machine, facts: Facts) -> Signs:
    """JAX does not use the card."""
    child = facts.failed_start(machine)
    if child and facts.reached():
        text = f"{machine.nodes()[0]} exists, and JAX started with the CPU alone"
        yield text + _plugin_error(child)
