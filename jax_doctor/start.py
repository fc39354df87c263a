"""Causes that show only when JAX starts or computes, and whatever is left over.

The wording of JAX changes between releases: a text alone is never the proof, only
together with how the child ended and with what the machine showed.
"""

import re

from jax_doctor.children import Child, JaxResult, Stage
from jax_doctor.libraries import with_wheels
from jax_doctor.machine import Machine, numbers
from jax_doctor.programs import OPERATIONS, OPTION, SUMS
from jax_doctor.table import OTHERWISE, Facts, Found, Words, step

cause = step("JAX and its devices")
otherwise = step(OTHERWISE)

NO_DNN = "DNN library initialization failed|(Loaded runtime CuDNN library: .*)"
DAMAGED = r"CUDA_ERROR_(?:ILLEGAL_ADDRESS|ECC_\w+|LAUNCH_FAILED)"
CROSSING = ("between devices", "psum")
READ_ON = "run with TF_CPP_MIN_LOG_LEVEL=0 and read what JAX says at its start"


@cause("A50", fix="drop the flag from XLA_FLAGS", asked="all")
def _unknown_flag(machine: Machine, facts: Facts) -> Words:
    """XLA_FLAGS holds a flag that this version does not know."""
    flag = facts.said_at_start(machine, r"Unknown flags? in XLA_FLAGS: (\S+)")
    if flag and flag[1].split("=")[0] in machine.environ.get("XLA_FLAGS", ""):
        yield f"XLA_FLAGS holds {flag[1]}, and the process ends without a traceback"


@cause("A12", fix="align the versions of jax, jaxlib and the plugin")
def _old_plugin_import(machine: Machine, facts: Facts) -> Words:
    """A plugin of JAX cannot be imported."""
    if facts.said_at_start(machine, r"Plugin module .* could not be loaded"):
        reason = facts.said_at_start(machine, r"ImportError: .*")
        yield reason[0] if reason else "JAX does not say why"


@cause("A18", fix="align the versions; pip uninstall -y jax-metal")
def _interface(machine: Machine, facts: Facts) -> Words:
    """A plugin speaks another version of JAX's interface."""
    if match := facts.said_at_start(machine, r"PJRT API version \(\S+\).*"):
        yield match[0]


@cause("A09", fix=with_wheels)
def _cudnn(machine: Machine, facts: Facts) -> Words:
    """The cuDNN that was loaded does not fit the one JAX was built with."""
    match = re.search(NO_DNN, facts.problems())
    if match and not _no_memory_for_cudnn(machine, facts):
        yield match[1] or "the convolution could not start cuDNN"


@cause("A63", fix="export XLA_CLIENT_MEM_FRACTION=0.5")
def _no_memory_for_cudnn(machine: Machine, facts: Facts) -> Words:
    """No memory is left for cuDNN."""
    said = facts.problems()
    # As XLA logs it.
    memory = re.search(r"(\d+) bytes free, (\d+) bytes total", said)
    if memory and re.search(NO_DNN, said) and int(memory[1]) <= int(memory[2]) / 20:
        yield f"cuDNN found {memory[1]} of {memory[2]} bytes free"


@cause("A37", fix="restart from the last checkpoint on another card; dmesg | grep Xid")
def _poisoned(machine: Machine, facts: Facts) -> Words:
    """The card's memory or program is damaged."""
    for word in re.findall(DAMAGED, facts.problems()):
        yield f"an operation ended in {word}"


@cause("A120", fix=f"export XLA_FLAGS={OPTION}=-reduce", asked="all")
def _wrong_sums(machine: Machine, facts: Facts) -> Words:
    """This jaxlib miscomputes sums on CPUs."""
    jaxlib = f"jaxlib {machine.distributions.get('jaxlib', '')}"
    if wrong := _wrong(facts.jax):
        has_flag = f"{OPTION}=-reduce" in machine.environ.get("XLA_FLAGS", "")
        fix = "pip install another version of jaxlib" if has_flag else ""
        yield Found(f"{jaxlib} is wrong in {wrong}", fix)
    if wrong := _wrong(facts.sums):
        words = f"without this flag {jaxlib} is wrong in {wrong}"
        yield Found(words, "", "warning")


def _wrong(jax: JaxResult | None) -> str:
    """Names the sums whose values were wrong, or in which a child crashed."""
    if jax is None:
        return ""
    end = "a crash" if jax.child.returncode is not None else "without an end"
    ended = [*jax.failures(), Stage(jax.unfinished, "", end)]
    wrong = [stage for stage in ended if stage.operation in SUMS]
    return "; ".join(f"{stage.operation} ({stage.problem})" for stage in wrong)


@cause(
    "A121",
    fix='pip install another version of JAX, such as "jax[cuda13]==0.10.2"; jax issues '
    "40633 and 39486",
)
def _wrong_values(machine: Machine, facts: Facts) -> Words:
    """This jaxlib miscomputes on this GPU."""
    for stage in facts.jax.failures() if facts.problems() and facts.on_gpu() else ():
        if stage.operation in OPERATIONS and stage.problem.startswith("wrong values"):
            yield f"{stage.operation} on {stage.device}: {stage.problem}"


@cause(
    "A19",
    fix="write jax.tree_map = jax.tree.map before jaxline is imported",
    severity="warning",
    asked="all",
)
def _jaxline(machine: Machine, facts: Facts) -> Words:
    """The installed jaxline calls a function that JAX removed."""
    jax = machine.distributions.get("jax", "")
    # Said by the doctor alone: commands do not ask JAX, and may need no jaxline.
    if facts.jax and "jaxline" in machine.distributions and numbers(jax) >= (0, 6):
        yield f"jaxline calls jax.tree_map, which jax {jax} lacks"


@cause(
    "A90",
    fix="export NCCL_P2P_DISABLE=1; in the BIOS switch ACS off, or boot with iommu=pt",
)
def _broken_copies(machine: Machine, facts: Facts) -> Words:
    """Copies between devices lose their values."""
    jax = facts.jax
    if not facts.problems() or not facts.on_gpu():
        return
    for stage in jax.failures():
        copies = stage.operation not in OPERATIONS
        if copies and stage.problem.startswith("wrong values"):
            yield f"{stage.operation} on {stage.device}: {stage.problem}"
    if jax.unfinished in CROSSING and jax.child.returncode is None:
        yield f"{jax.unfinished} did not end within {jax.child.seconds:.0f} s"


def _plugin_words(child: Child) -> str:
    """Error that kept JAX's plugin from starting; empty if there was none.

    JAX logs it, and says after it, wrongly, that no CUDA-enabled jaxlib is installed.
    """
    _, failed, said = child.errors.rpartition("Jax plugin configuration error")
    errors = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", said, re.MULTILINE)
    return f": {errors[-1]}" if failed and errors else ""


@otherwise("A00", fix="ask for one of these", asked="all")
def _absent_index(machine: Machine, facts: Facts) -> Words:
    """A device that was asked for does not exist."""
    platform, most = facts.platform, max(facts.indices, default=0)
    devices = facts.jax.devices if facts.jax else ()
    there = [device for device in devices if device.platform == platform]
    if there and most >= len(there):
        names = ", ".join(f"{platform}:{i}" for i in range(len(there)))
        words = f"{platform}:{most} was asked for, and there are {names}"
        simulate = f"ask for one of these, or export JAX_NUM_CPU_DEVICES={most + 1}"
        yield Found(words, simulate if platform == "cpu" else "")


@otherwise("A00", fix=READ_ON, asked="all")
def _run_failed(machine: Machine, facts: Facts) -> Words:
    """The test run failed."""
    jax = facts.jax
    if not facts.reached() or jax.works():
        return
    ended = f"ended with code {jax.child.returncode}"
    if jax.child.returncode is None:
        ended = f"was stopped after {jax.child.seconds:.0f} s"
    inside = f" in {jax.unfinished}" if jax.unfinished else ""
    failed = [f"{s.operation} on {s.device}: {s.problem}" for s in jax.failures()]
    said = "; ".join(failed) or jax.child.last_words()
    yield f"the test run {ended}{inside}: {said}"


@otherwise("A00", fix=READ_ON, asked="all")
def _start_failed(machine: Machine, facts: Facts) -> Words:
    """JAX does not show the device."""
    if not facts.jax or facts.reached():
        return
    child = facts.jax.child
    if child.returncode is None:
        yield f"starting JAX took more than {child.seconds:.0f} s and was stopped"
    if child.returncode != 0:
        yield f"JAX does not start: {child.last_words()}"
    seen = ", ".join(sorted({device.backend for device in facts.jax.devices}))
    without = f"JAX started with {seen or 'nothing'}, without {facts.platform}"
    yield without + _plugin_words(child)


@otherwise("A00", fix=READ_ON)
def _card_unused(machine: Machine, facts: Facts) -> Words:
    """JAX does not use the card."""
    child = facts.failed_start(machine)
    if child and facts.reached():
        alone = f"{machine.nodes()[0]} exists, and JAX started with the CPU alone"
        yield alone + _plugin_words(child)
