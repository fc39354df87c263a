"""Program of its own that asks the NVIDIA driver and writes its answers as JSON.

Run by path with `python -I -S`, so that it starts in milliseconds and can be killed: a
broken driver may hang or end the process that asks it. One line for CUDA, then one for
NVML with the memory of the cards and its users.
"""

import ctypes
import json
import os
import re

NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
NO_LIBRARY = 303
# nvmlReturn_t, and the number that stands for "not available".
TOO_SMALL, UNAVAILABLE = 7, 2**64 - 1
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
CAPABILITY = (75, 76)


def _integer(function: ctypes._CFuncPtr, *args: int) -> int | None:
    """Integer that a driver function stores through its argument; None if it fails."""
    value = ctypes.c_int(0)
    return value.value if function(ctypes.byref(value), *args) == 0 else None


def ask_cuda() -> dict:
    """Loads libcuda.so.1, starts it, and asks for version, devices and their age."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"code": NO_LIBRARY, "problem": str(error)}
    answer = {"library": _mapped("libcuda.so"), "code": cuda.cuInit(0)}
    name = ctypes.c_char_p()
    # Why: docs/decisions/doctor.md#codes
    cuda.cuGetErrorName(answer["code"], ctypes.byref(name))
    answer["name"] = (name.value or b"").decode()
    answer["version"] = _integer(cuda.cuDriverGetVersion)
    if answer["code"] == 0:
        answer["count"] = _integer(cuda.cuDeviceGetCount)
        ask = getattr(cuda, "cuDeviceGetAttribute", None)
        answer["capabilities"] = [
            [_integer(ask, attribute, device) or 0 for attribute in CAPABILITY]
            for device in range(answer["count"] or 0 if ask else 0)
        ]
    return answer


def _mapped(name: str) -> str:
    with open("/proc/self/maps") as lines:
        for line in lines:
            match = re.search(r"(/.*" + re.escape(name) + r"\S*)$", line.rstrip())
            if match:
                return os.path.realpath(match[1])
    return ""


def refused() -> dict[str, str]:
    """Device nodes that exist and cannot be opened, with the reason."""
    reasons = {}
    for node in NODES:
        if not os.path.exists(node):
            continue
        try:
            os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            reasons[node] = os.strerror(error.errno)
    return reasons


class Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class Process(ctypes.Structure):
    """nvmlProcessInfo_t, as the functions ending in _v3 fill it; memory in bytes."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def _processes(ask: ctypes._CFuncPtr, card: ctypes.c_void_p) -> list[Process] | None:
    """Processes that one of NVML's functions lists; None if it does not tell."""
    room = 64
    for _ in range(3):  # Between two questions a process may start.
        count, processes = ctypes.c_uint(room), (Process * room)()
        code = ask(card, ctypes.byref(count), processes)
        if code != TOO_SMALL:
            return processes[: count.value] if code == 0 else None
        room = 2 * max(room, count.value)
    return None


def _users(nvml: ctypes.CDLL, card: ctypes.c_void_p) -> list[dict] | None:
    """Id and bytes of each process on a card; None where NVML does not tell."""
    users = {}
    for kind in ("Compute", "Graphics"):
        ask = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3", None)
        processes = _processes(ask, card) if ask else None
        if processes is None and kind == "Compute":
            return None
        for process in processes or ():
            if process.used != UNAVAILABLE:
                users[process.pid] = process.used
            users.setdefault(process.pid)  # None, where nobody tells.
    return [{"pid": pid, "bytes_in_use": users[pid]} for pid in sorted(users)]


def ask_nvml() -> dict:
    """Asks NVML for its state, and for the memory in use on each card, by process."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        code = nvml.nvmlInit_v2()
    except (OSError, AttributeError):
        return {}
    memory = []
    count = _integer(nvml.nvmlDeviceGetCount_v2) if code == 0 else 0
    for index in range(count or 0):
        card, size, users = ctypes.c_void_p(), Memory(), None
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(card)) == 0:
            nvml.nvmlDeviceGetMemoryInfo(card, ctypes.byref(size))
            users = _users(nvml, card)
        row = {"bytes_in_use": size.used, "bytes": size.total, "processes": users}
        memory.append(row)
    return {"nvml": code, "memory": memory}


if __name__ == "__main__":
    # NVML may hang where CUDA answers: what is known by then is not lost.
    print(json.dumps({"refused": refused(), **ask_cuda()}), flush=True)
    print(json.dumps(ask_nvml()), flush=True)
