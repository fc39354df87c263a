"""Causes that show only when a device has to compute, and whatever is left over.

The wording of JAX changes between releases: a text alone is never the proof, only
together with how the child ended and with what the machine showed.
"""

import re

from haiku_template.diagnosis import cards, libraries, usage
from haiku_template.diagnosis.machine import Machine
from haiku_template.diagnosis.rows import Cause, Facts
from haiku_template.diagnosis.start import failed_start, on_gpu, plugin_words, reached

ABORT = (-6, 134)
NO_DNN = ("DNN library initialization failed", "Loaded runtime CuDNN library")
CROSSING = ("between devices", "psum")


def _problems(facts: Facts) -> str:
    """Everything that went wrong in the test run, as one text."""
    run = facts.operations
    if not run or run.works():
        return ""
    said = [stage.problem for stage in run.failures()]
    return "\n".join([*said, run.child.errors])


def _memory(facts: Facts) -> tuple[int, int] | None:
    """Bytes free and in all when cuDNN failed to start, as XLA logged them."""
    found = re.search(r"(\d+) bytes free, (\d+) bytes total", _problems(facts))
    return (int(found[1]), int(found[2])) if found else None


def _card_full(machine: Machine, facts: Facts) -> str | None:
    said = _problems(facts)
    if facts.jax and not reached(facts):
        said += facts.jax.child.errors
    if "RESOURCE_EXHAUSTED" not in said and "CUDA_ERROR_OUT_OF_MEMORY" not in said:
        return None
    held = usage.holders(machine, facts.driver)
    return f"no memory left; the card is held by {held or 'others'}"


def _no_memory_for_cudnn(machine: Machine, facts: Facts) -> str | None:
    memory = _memory(facts)
    if not memory or not any(words in _problems(facts) for words in NO_DNN):
        return None
    if memory[0] > memory[1] / 20:
        return None
    return f"cuDNN found {memory[0]} of {memory[1]} bytes free"


def _cudnn(machine: Machine, facts: Facts) -> str | None:
    said = _problems(facts)
    if _no_memory_for_cudnn(machine, facts) or not any(w in said for w in NO_DNN):
        return None
    versions = re.search(r"Loaded runtime CuDNN library: .*", said)
    return versions[0] if versions else "the convolution could not start cuDNN"


def _poisoned(machine: Machine, facts: Facts) -> str | None:
    match = re.search(
        r"CUDA_ERROR_(?:ILLEGAL_ADDRESS|ECC_\w+|LAUNCH_FAILED)", _problems(facts)
    )
    return f"an operation ended in {match[0]}" if match else None


def _compiler(machine: Machine, facts: Facts) -> str | None:
    match = re.search(
        r".*(libdevice not found|ptxas not found|Unsupported \.version).*",
        _problems(facts),
    )
    return match[0].strip() if match else None


def _no_kernel(machine: Machine, facts: Facts) -> str | None:
    run = facts.operations
    if not run or run.works() or not on_gpu(facts):
        return None
    said = "NoKernelImageForDevice" in _problems(facts)
    said = said or "no kernel image is available" in _problems(facts)
    other = _poisoned(machine, facts) or _cudnn(machine, facts)
    aborted = run.child.returncode in ABORT and run.unfinished == "matmul" and not other
    if not (said or aborted):
        return None
    return "the card is listed, and a matrix product on it fails"


def _broken_copies(machine: Machine, facts: Facts) -> str | None:
    run = facts.operations
    if not run or run.works() or not on_gpu(facts):
        return None
    for stage in run.failures():
        if stage.problem.startswith("wrong values"):
            return f"{stage.operation} on {stage.device}: {stage.problem}"
    if run.unfinished in CROSSING and run.child.returncode is None:
        return f"{run.unfinished} did not end within {run.child.seconds:.0f} s"
    return None


def _run_failed(machine: Machine, facts: Facts) -> str | None:
    run = facts.operations
    if not run or run.works():
        return None
    ended = f"ended with code {run.child.returncode}"
    if run.child.returncode is None:
        ended = f"was stopped after {run.child.seconds:.0f} s"
    inside = f" in {run.unfinished}" if run.unfinished else ""
    failed = [f"{s.operation} on {s.device}: {s.problem}" for s in run.failures()]
    said = "; ".join(failed) or run.child.last_words()
    return f"the test run {ended}{inside}: {said}"


def _start_failed(machine: Machine, facts: Facts) -> str | None:
    if not facts.jax or reached(facts):
        return None
    child = facts.jax.child
    if child.returncode is None:
        return f"starting JAX took more than {child.seconds:.0f} s and was stopped"
    if child.returncode != 0:
        return f"JAX does not start: {child.last_words()}"
    seen = sorted({device.backend for device in facts.jax.devices})
    without = f"JAX started with {', '.join(seen) or 'nothing'}, without {facts.asked}"
    return ": ".join(filter(None, [without, plugin_words(child)]))


def _card_unused(machine: Machine, facts: Facts) -> str | None:
    child = failed_start(machine, facts)
    if not child or not reached(facts):
        return None
    alone = f"{machine.nodes()[0]} exists, and JAX started with the CPU alone"
    return ": ".join(filter(None, [alone, plugin_words(child)]))


ROWS = (
    Cause(
        "A61",
        "another process holds the card's memory",
        _card_full,
        "end it, or export XLA_PYTHON_CLIENT_PREALLOCATE=false",
    ),
    Cause(
        "A63",
        "no memory is left for cuDNN",
        _no_memory_for_cudnn,
        "export XLA_CLIENT_MEM_FRACTION=0.5",
    ),
    Cause(
        "A09",
        "cuDNN does not fit the one JAX was built with",
        _cudnn,
        libraries.with_wheels,
    ),
    Cause(
        "A37",
        "the card's memory or program is damaged",
        _poisoned,
        "restart from the last checkpoint on another card; dmesg | grep Xid",
    ),
    Cause(
        "A17",
        "the compiler for the card is missing or old",
        _compiler,
        libraries.with_wheels,
    ),
    Cause(
        "A31",
        "JAX has no program for this card",
        _no_kernel,
        cards.fix_old_card,
    ),
    Cause(
        "A90",
        "copies between devices lose their values",
        _broken_copies,
        "export NCCL_P2P_DISABLE=1; in the BIOS switch ACS off, or boot with iommu=pt",
    ),
)
_READ_ON = "run with TF_CPP_MIN_LOG_LEVEL=0 and read what JAX says at its start"
# Asked last, and only when no other row explains what happened.
OTHERWISE = (
    Cause("A00", "the test run failed", _run_failed, _READ_ON, asked="all"),
    Cause("A00", "JAX does not show the device", _start_failed, _READ_ON, asked="all"),
    Cause("A00", "JAX does not use the card", _card_unused, _READ_ON),
)
