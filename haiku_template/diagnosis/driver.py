"""Causes in the driver, told by what it answered to a child process."""

from haiku_template.diagnosis import cards, usage, versions
from haiku_template.diagnosis.machine import WSL_NODE, Machine
from haiku_template.diagnosis.rows import Cause, Detect, Facts, cuda_families

# The codes of cuInit that have a row of their own.
NO_LIBRARY, NO_DEVICE, STUB = 303, 100, 34
NOT_READY, MISMATCH, COMPAT = 802, 803, 804
NO_MEMORY, BUSY, NO_SUCH_DEVICE, SYSTEM_CALL = 2, 46, 101, 304
MPS = (805, 806, 807, 808, 809)
OWN_ROWS = (0, NO_LIBRARY, NO_DEVICE, STUB, NOT_READY, MISMATCH, COMPAT, *MPS)
OWN_ROWS += (NO_MEMORY, BUSY, NO_SUCH_DEVICE, SYSTEM_CALL)
OLDEST_CUDA = {"12": 12000, "13": 13000}
OLDEST_CARD = {"12": (5, 2), "13": (7, 5)}


def _answers(*codes: int) -> Detect:
    """Detects these codes of cuInit."""

    def detect(machine: Machine, facts: Facts) -> str | None:
        result = facts.driver
        if not result or result.code not in codes or _wsl(machine, facts):
            return None
        where = f" from {result.library}" if result.library else ""
        said = f"cuInit(0) returned {result.code}, {result.name or result.problem}"
        return said + where

    return detect


def _held(*codes: int) -> Detect:
    """The same, and who holds the cards."""

    def detect(machine: Machine, facts: Facts) -> str | None:
        found = _answers(*codes)(machine, facts)
        held = usage.holders(machine, facts.driver) if found else ""
        return f"{found}; the card is held by {held}" if held else found

    return detect


def _no_such_device(machine: Machine, facts: Facts) -> str | None:
    found = _answers(NO_SUCH_DEVICE)(machine, facts)
    value = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if found and value is not None:
        return f"{found}; CUDA_VISIBLE_DEVICES={value!r}"
    return found


def _refused(machine: Machine, facts: Facts) -> str | None:
    if not facts.driver or not facts.driver.refused or facts.driver.code == 0:
        return None
    node, reason = facts.driver.refused[0]
    return f"{node} exists and cannot be opened: {reason}"


def _wsl(machine: Machine, facts: Facts) -> str | None:
    result = facts.driver
    if not result or WSL_NODE not in machine.nodes() or result.code == 0:
        return None
    if "/usr/lib/wsl/" in result.library:
        return None
    loaded = result.library or "not to be found"
    return (
        f"/dev/dxg exists, cuInit(0) returned {result.code}, libcuda.so.1 is {loaded}"
    )


def _no_device(machine: Machine, facts: Facts) -> str | None:
    found = _answers(NO_DEVICE)(machine, facts)
    if not found or _refused(machine, facts):
        return None
    value = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if value is not None:
        others = facts.driver.count_unmasked or 0
        return f"{found}; CUDA_VISIBLE_DEVICES={value!r}, and {others} without it"
    return f"{found}; the card may have dropped out (dmesg | grep -i nvrm)"


def _fix_no_device(machine: Machine) -> str:
    if "CUDA_VISIBLE_DEVICES" in machine.environ:
        return cards.FIX_MASKED
    return "sudo nvidia-smi --gpu-reset, or reboot; restart the container with its card"


def _none_counted(machine: Machine, facts: Facts) -> str | None:
    result = facts.driver
    if not result or result.code != 0 or result.count != 0:
        return None
    value = machine.environ.get("CUDA_VISIBLE_DEVICES")
    masked = "" if value is None else f"; CUDA_VISIBLE_DEVICES={value!r}"
    return f"the driver started and counts 0 devices{masked}"


def _old_cuda(machine: Machine, facts: Facts) -> str | None:
    result = facts.driver
    if not result or result.code != 0 or not result.version:
        return None
    for family in cuda_families(machine):
        if result.version < OLDEST_CUDA[family]:
            return f"the driver supports CUDA {_cuda(result.version)}, not {family}"
    return None


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _unknown(machine: Machine, facts: Facts) -> str | None:
    result = facts.driver
    if not result or result.code in OWN_ROWS or _wsl(machine, facts):
        return None
    if _refused(machine, facts):
        return None
    if result.code is None:
        return f"the driver gave no answer: {result.problem}"
    uvm = machine.path("/dev/nvidia-uvm").exists()
    missing = "" if uvm else "; /dev/nvidia-uvm does not exist"
    return f"cuInit(0) returned {result.code}, {result.name}{missing}"


def _old_card(machine: Machine, facts: Facts) -> str | None:
    for family in cuda_families(machine):
        oldest = OLDEST_CARD[family]
        for index, found in enumerate(
            facts.driver.capabilities if facts.driver else ()
        ):
            if found < oldest:
                return (
                    f"card {index} has compute capability {found[0]}.{found[1]}, and "
                    f"JAX for CUDA {family} needs {oldest[0]}.{oldest[1]}"
                )
    return None


def _nvml(machine: Machine, facts: Facts) -> str | None:
    result = facts.driver
    if result and result.code == 0 and result.nvml not in (0, None):
        return f"nvmlInit_v2() returned {result.nvml}, though CUDA starts"
    return None


def _slow_compiler(machine: Machine, facts: Facts) -> str | None:
    result = facts.driver
    if not result or result.code != 0 or not result.version:
        return None
    if _old_cuda(machine, facts):
        return None
    # Another CUDA's wheel may have stayed, which nobody uses.
    names = {"12": "nvidia-cuda-nvcc-cu12", "13": "nvidia-cuda-nvcc"}
    for name in (names[family] for family in cuda_families(machine)):
        wheel = machine.distributions.get(name, "")
        if wheel and versions.numbers(wheel)[:2] > (
            result.version // 1000,
            result.version % 1000 // 10,
        ):
            return (
                f"the driver supports CUDA {_cuda(result.version)}, {name} is {wheel}"
            )
    return None


ROWS = (
    Cause(
        "A32",
        "the device nodes can no longer be opened",
        _refused,
        "recreate the container (docker rm, docker run --gpus all ...)",
    ),
    Cause("A33", "in WSL the driver's library is not WSL's own", _wsl, cards.FIX_WSL),
    Cause(
        "A21", "libcuda.so.1 cannot be loaded", _answers(NO_LIBRARY), cards.FIX_LIBRARY
    ),
    Cause(
        "A27",
        "libcuda.so.1 is the toolkit's stub, not the driver",
        _answers(STUB),
        cards.FIX_STUB,
    ),
    Cause(
        "A23",
        "the kernel module and libcuda.so.1 are of different drivers",
        _answers(MISMATCH),
        cards.FIX_MISMATCH,
    ),
    Cause(
        "A24",
        "the cuda-compat package does not support this card",
        _answers(COMPAT),
        cards.FIX_COMPAT,
    ),
    Cause(
        "A25",
        "the fabric manager of this NVSwitch host does not run",
        _answers(NOT_READY),
        "sudo systemctl start nvidia-fabricmanager",
    ),
    Cause(
        "A61",
        "the driver has no memory left to start in",
        _held(NO_MEMORY),
        "end the process that holds the card; lift this process's own limits "
        "(ulimit -v unlimited, docker run without --memory)",
    ),
    Cause(
        "A38",
        "the card is busy, or allows one process alone",
        _held(BUSY),
        "end the process that holds it, or sudo nvidia-smi --compute-mode=DEFAULT",
    ),
    Cause(
        "A110",
        "the driver was asked for a card that does not exist",
        _no_such_device,
        "unset CUDA_VISIBLE_DEVICES; where MIG is on, sudo nvidia-smi mig -cgi 0 -C; "
        "under Slurm, --gres=gpu:N in place of --gpus-per-task",
    ),
    Cause(
        "A39",
        "the system refuses the driver a call",
        _answers(SYSTEM_CALL),
        "docker run --security-opt seccomp=unconfined --ulimit memlock=-1 ...; outside "
        "a container: ulimit -l unlimited, and write permission on /dev/nvidia-uvm",
    ),
    Cause(
        "A59",
        "CUDA's MPS server does not serve this process",
        _answers(*MPS),
        "unset CUDA_MPS_PIPE_DIRECTORY, or start it: nvidia-cuda-mps-control -d",
    ),
    Cause("A22", "the driver finds no card", _no_device, _fix_no_device),
    Cause("A26", "the driver fails without saying why", _unknown, cards.FIX_UVM),
    Cause(
        "A29",
        "the driver is too old for the installed CUDA",
        _old_cuda,
        cards.fix_old_driver,
    ),
    Cause("A28", "the driver counts no devices", _none_counted, _fix_no_device),
    Cause(
        "A31",
        "the card is too old for the installed CUDA",
        _old_card,
        cards.fix_old_card,
    ),
    Cause(
        "A32",
        "NVML does not start: nvidia-smi will not work",
        _nvml,
        "reboot, or recreate the container",
        severity="warning",
    ),
    Cause(
        "A30",
        "the driver is older than the compiler: compiling is slow",
        _slow_compiler,
        "update the driver",
        severity="warning",
    ),
)
