"""Child process of a conversion; prints facts as JSON.

Takes INPUT, OUTPUT, KEY, and True to unreplicate.
"""

import contextlib
import json
import math
import re
import resource
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from haiku_template.conversion import files, trees
from haiku_template.errors import ConfigError, printable

ROOM = 2**28  # Bytes beside the file that is read.
# Why: docs/decisions/storage.md#pickle-seconds
SECONDS, BYTES_A_SECOND = 20, 2**21  # Of a processor, which may be a slow one.
DTYPES = {"bool": "BOOL", "bfloat16": "BF16"}  # As safetensors spell them.
DTYPES |= {f"float{bits}": f"F{bits}" for bits in (16, 32, 64)}
DTYPES |= {f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)}
DTYPES |= {f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)}


def limit_memory(size: int) -> None:
    """Limits this process to little more than the bytes of what it reads."""
    with contextlib.suppress(OSError, ValueError):  # Only Linux says what it uses.
        used = re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())
        most = int(used[1]) * 1024 + 3 * size + ROOM
        _, hard = resource.getrlimit(resource.RLIMIT_AS)  # It may grow again.
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def limit_time(size: int) -> None:
    """Limits this process's processor time to what so many bytes need; it may grow."""
    seconds = SECONDS + size // BYTES_A_SECOND
    unpacked = max(files.ALWAYS, files.MOST_TIMES * size)  # At most.

    def refuse(*_: object) -> None:
        raise ConfigError(
            f"it takes more than {seconds} seconds of a processor to read, as no "
            "weights in a file of its size do"
        )

    signal.signal(signal.SIGXCPU, refuse)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    # Endless is -1; once set, it stays.
    hard = min(hard % 2**64, seconds + SECONDS + unpacked // BYTES_A_SECOND)
    resource.setrlimit(resource.RLIMIT_CPU, (min(seconds, hard), hard))


def limit(size: int) -> None:
    """Limits what this process takes to read so many bytes."""
    limit_memory(size)
    limit_time(size)


# Why: docs/decisions/finetuning.md#convert
def write(target: Path, arrays: dict[str, np.ndarray], most: int) -> int:
    """Writes safetensors, an array at a time; returns their bytes.

    Raises `ConfigError` if an array is of no dtype of safetensors, or all have more
    bytes than `most`, as when a file names one array many times.
    """
    # The largest items first, so that every array is aligned.
    arrays = dict(sorted(arrays.items(), key=lambda x: (-x[1].dtype.itemsize, x[0])))
    header, size = {}, 0
    for name, array in arrays.items():
        if (dtype := DTYPES.get(array.dtype.name)) is None:
            raise ConfigError(
                f"{name} is of dtype {array.dtype.name}; possible are "
                f"{', '.join(DTYPES)}"
            )
        offsets = [size, size + array.nbytes]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": offsets}
        size = offsets[1]
    if size > most:
        raise ConfigError(f"it names the same arrays again, to {size:,} bytes in all")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            native = array.dtype.newbyteorder("=")
            array.astype(native, copy=False).tofile(file)  # In C order.
    return size


def first_replica(name: str, array: np.ndarray) -> np.ndarray:
    """Takes the first of replicas, [devices, ...]; of network state they may differ."""
    # A module that averages over no devices has its own on each.
    is_state = name.startswith(f"{trees.STATE[0]}/")
    has_first = array.ndim and len(array)
    if not has_first or not (is_state or are_equal(array)):
        raise ConfigError(
            f"{name} {array.dtype}{list(array.shape)} is not the same on all devices "
            "of its first axis: --unreplicate is for what jax.pmap has replicated"
        )
    return array[0]


def are_equal(rows: np.ndarray) -> bool:
    """Tests for the same bits in each row."""
    first = rows[0].tobytes()
    return all(row.tobytes() == first for row in rows)


def main(source: str, output: str, key: str, unreplicate: str = "") -> dict[str, Any]:
    """Converts a file; returns what was written, or what is wrong."""
    path, target = Path(source), Path(output)
    limit(path.stat().st_size)
    with TemporaryDirectory(dir=target.parent) as scratch:
        try:
            tree = files.load(path, Path(scratch), limit)
            arrays, chosen_key, other_keys = trees.choose(tree, key or None)
            if unreplicate == str(True):
                arrays = {name: first_replica(name, x) for name, x in arrays.items()}
            read = [path, *Path(scratch).iterdir()]
            most = 4 * sum(file.stat().st_size for file in read) + files.ALWAYS
            size = write(target, arrays, most)
        except ConfigError as error:
            return {"refused": printable(str(error))}
        except MemoryError:
            return {"refused": "it asks for more memory than a file of its size may"}
        except OSError as error:
            return {"failed": str(error)}
    count = sum(math.prod(array.shape) for array in arrays.values())
    facts = {"arrays": len(arrays), "numbers": count, "bytes": size}
    return facts | {"taken": chosen_key, "left": [*map(printable, other_keys)]}


if __name__ == "__main__":
    limit_time(Path(sys.argv[1]).stat().st_size)
    print(json.dumps(main(*sys.argv[1:5])))
