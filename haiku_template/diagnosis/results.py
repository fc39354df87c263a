"""What the child processes report, as values."""

import signal
from typing import NamedTuple


class Child(NamedTuple):
    """How a child process ended.

    Attributes:
      returncode: None when it was killed at the time limit; negative: the signal.
      output: what it wrote on standard output.
      errors: what it wrote on standard error.
      seconds: how long it ran.
    """

    returncode: int | None
    output: str
    errors: str
    seconds: float

    def last_words(self) -> str:
        """The last line on standard error, and the signal that ended it, if one did."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        said = lines[-1] if lines else "it said nothing"
        if self.returncode is None or self.returncode >= 0:
            return said
        return f"ended by {signal.Signals(-self.returncode).name}: {said}"


class CardMemory(NamedTuple):
    """The memory of one card, as NVML counts it.

    Attributes:
      used: bytes in use by anyone.
      total: bytes in all.
      users: id and bytes of each process, as the host numbers them; None for bytes that
        NVML does not know, None for all when it does not tell.
    """

    used: int
    total: int
    users: tuple[tuple[int, int | None], ...] | None = None


class DriverResult(NamedTuple):
    """What the NVIDIA driver answered.

    Attributes:
      code: of cuInit; 303 when libcuda.so.1 could not be loaded, as JAX counts it;
        None when there was no answer.
      name: of the code, as CUDA_ERROR_NO_DEVICE.
      problem: why there was no answer, or what the loader said.
      version: of CUDA that the driver supports, as 12090; None when not known.
      count: devices that a program may use.
      count_unmasked: devices without CUDA_VISIBLE_DEVICES; None when not asked.
      library: the file that was loaded as libcuda.so.1.
      capabilities: compute capability of each device, as (9, 0).
      refused: device nodes that could not be opened, with the reason.
      nvml: code of nvmlInit_v2; None when there is no NVML.
      memory: of each card, and who uses it.
      seconds: how long it took.
    """

    code: int | None
    name: str = ""
    problem: str = ""
    version: int | None = None
    count: int | None = None
    count_unmasked: int | None = None
    library: str = ""
    capabilities: tuple[tuple[int, int], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    nvml: int | None = None
    memory: tuple[CardMemory, ...] = ()
    seconds: float = 0.0


class Device(NamedTuple):
    """One device as JAX sees it; memory in bytes, None where JAX cannot tell."""

    backend: str
    platform: str
    id: int
    kind: str
    bytes_in_use: int | None = None
    bytes_limit: int | None = None


class JaxResult(NamedTuple):
    """What a child found that imported JAX and asked for its devices.

    Attributes:
      devices: of every backend; empty when JAX did not start.
      default: the platform that JAX would use.
      libraries: the CUDA libraries that were loaded.
    """

    child: Child
    devices: tuple[Device, ...] = ()
    default: str = ""
    libraries: tuple[str, ...] = ()


class Stage(NamedTuple):
    """One operation of the test run: what, where, and what went wrong."""

    operation: str
    device: str
    problem: str = ""


class OperationsResult(NamedTuple):
    """What a child found that computed on the devices.

    Attributes:
      stages: the operations that came to an end, in order.
      unfinished: the operation in which the child died or was killed; empty if none.
      num_devices: how many devices were to be tried.
    """

    child: Child
    stages: tuple[Stage, ...] = ()
    unfinished: str = ""
    num_devices: int = 0

    def failures(self) -> list[Stage]:
        """The operations whose results were wrong or that raised an error."""
        return [stage for stage in self.stages if stage.problem]

    def works(self) -> bool:
        """Whether every operation gave the right values."""
        done = self.child.returncode == 0 and bool(self.stages)
        return done and not self.failures() and not self.unfinished
