"""Lets each operation on files of a run fail, or kills it there: what becomes of it.

    make bench-faults
    python -m benchmarks.faults [--every=1] [--kills=20] [--parallel=3]

A run of four steps saves twice and removes the save that is replaced. A preloaded
library (faults.c) lets its file operations in `checkpoints/` fail, one after another:
once, five in a row, and for good; reads, too, as it resumes. A run that ended is
started again, without faults. For kills the library copies the workdir before each
operation on any file of it, which is what `kill -9` there would leave, and each copy is
resumed; beside them are some real kills. A run survived if it ends with the state of an
undisturbed one, bit for bit, and each checkpoint that is left is verified. Needs a C
compiler. Exit code 1 if a run was lost.
"""

import argparse
import ctypes
import errno
import hashlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from haiku_template.data import ArrayDataset, BatchSpec, Data
from haiku_template.devices import DeviceManager
from haiku_template.errors import StorageError
from haiku_template.models import mlp
from haiku_template.preflight import fingerprint
from haiku_template.runs import train
from haiku_template.storage import Checkpoints, checkpoint
from haiku_template.storage import workdir as workdirs
from haiku_template.training import Experiment, Trainer, classification

SOURCE = Path(__file__).with_suffix(".c")
STEPS, SAVE_EVERY, SECONDS, FOR_GOOD = 4, 2, 300, 10**9
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # Files in memory.
LENGTHS = {"once": 1, "5 in a row": 5, "for good": FOR_GOOD}
# Faults: changes (False) or reads (True) of files, errno, operations in a row.
KINDS = {
    "write: EIO": (False, errno.EIO),
    "write: ENOSPC": (False, errno.ENOSPC),
    "read: EIO": (True, errno.EIO),
}
FAULTS = {
    f"{kind} {name}": (*fault, length)
    for kind, fault in KINDS.items()
    for name, length in LENGTHS.items()
}
COPY, KILL = "kill: what it leaves", "kill -9"
ROWS = [*FAULTS, COPY, KILL]
WENT_ON, STARTED_AGAIN, LOST = "went on", "started again", "lost"


def make_trainer() -> Trainer:
    """Trainer of an MLP on random rows, with moments."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(32, 5)).astype(np.float32)
    labels = (np.arange(32) % 3).astype(np.int32)
    return Experiment(
        model=mlp(3, width=64),
        task=classification,
        data=Data(ArrayDataset(inputs, labels, BatchSpec(8)), None, 3),
        optimizer=optax.adam(1e-3),
    ).trainer(DeviceManager.create("cpu", num_devices=1))


def run(trainer: Trainer, workdir: Path, num_steps: int = STEPS) -> str:
    """Trains, or resumes; returns the digest of the state."""
    every = {"log_every": 1, "save_every": SAVE_EVERY, "keep_last": 1, "keep_best": 0}
    state = train(trainer, num_steps=num_steps, workdir=workdir, **every).state
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        digest.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()


def arm(workdir: Path, reads: bool, first: int, length: int, code: int) -> None:
    """Lets file operations below `workdir` fail from now on; see faults.c."""
    library = ctypes.CDLL(None)
    library.faults_arm.argtypes = [ctypes.c_char_p, *[ctypes.c_long] * 4]
    library.faults_arm(os.fsencode(workdir), reads, first, length, code)


def disarm() -> int:
    """Ends the faults; returns the number of operations since they were armed."""
    return ctypes.CDLL(None).faults_disarm()


def outcome(trainer: Trainer, workdir: Path, expected: str) -> tuple[str, str]:
    """Runs with the faults that are armed, and without if it ends: outcome, error."""
    result, sentence = WENT_ON, ""
    try:
        digest = run(trainer, workdir)
        disarm()
    except StorageError as error:
        disarm()
        result, sentence = STARTED_AGAIN, str(error)
        digest = run(trainer, workdir)
    if digest != expected:
        return LOST, f"another state; {sentence}"
    folder = workdir / workdirs.CHECKPOINTS
    with Checkpoints(folder, run=workdirs.run_id(workdir)) as checkpoints:
        if checkpoints.latest != STEPS:
            return LOST, f"steps {checkpoints.steps}; {sentence}"
        for step in checkpoints.steps:
            checkpoints.verify(step)
    return result, sentence


def cases(fault: str, numbers: range, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields what came of the fault at each of these operations."""
    reads, code, length = FAULTS[fault]
    trainer = make_trainer()
    expected = run(trainer, folder / "expected")
    begun = folder / "begun"
    if reads:  # Two checkpoints to resume from.
        run(trainer, begun, SAVE_EVERY)
        shutil.copytree(begun, folder / "earlier")
        run(trainer, begun, 2 * SAVE_EVERY)
        step = f"{workdirs.CHECKPOINTS}/{SAVE_EVERY}"
        shutil.copytree(folder / "earlier" / step, begun / step)
    for number in numbers:
        workdir = folder / "run"
        shutil.rmtree(workdir, ignore_errors=True)
        if reads:
            shutil.copytree(begun, workdir)
        arm(workdir / workdirs.CHECKPOINTS, reads, number, length, code)
        try:
            result, sentence = outcome(trainer, workdir, expected)
        except Exception as error:
            disarm()
            result, sentence = LOST, f"{type(error).__name__}: {error}"
        yield {"number": number, "result": result, "sentence": sentence[:300]}


def count(reads: bool, folder: Path) -> int:
    """Number of operations of a run, or of reads as it resumes."""
    trainer, workdir = make_trainer(), folder / "counted"
    if reads:
        run(trainer, workdir, 2 * SAVE_EVERY)
    arm(workdir / workdirs.CHECKPOINTS, reads, FOR_GOOD, 1, errno.EIO)
    run(trainer, workdir)
    return disarm()


def forked(work: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yields what a forked process does; returns when it ends, or hangs."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            for value in work():
                os.write(sink, json.dumps(value).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(sink)
    with os.fdopen(source) as lines:
        while select.select([lines], [], [], SECONDS)[0] and (line := lines.readline()):
            yield json.loads(line)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def tried(fault: str, every: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields what came of a fault at each operation, in processes that may end."""
    total = next(forked(lambda: iter([count(FAULTS[fault][0], folder)])))
    number = 0
    while number < total:
        place = folder / f"from-{number}"
        numbers = range(number, total, every)
        for case in forked(lambda place=place, n=numbers: cases(fault, n, place)):
            number = case["number"] + every
            yield case
        if number < total:
            yield {"number": number, "result": LOST, "sentence": "hung, or crashed"}
            number += every


def killed(number: int, folder: Path, expected: str) -> dict[str, Any]:
    """Kills a run at an operation in its workdir, and starts it again.

    At an earlier one if the run ends before it: their number differs from run to run.
    """

    def die() -> Iterator[str]:
        arm(folder, False, number, 1, -signal.SIGKILL)
        yield run(make_trainer(), folder)

    def resume() -> Iterator[str]:
        yield run(make_trainer(), folder)

    ended = [*forked(die)]
    if ended and number:
        shutil.rmtree(folder)
        return killed(number * 7 // 8, folder, expected)
    digests = ended or [*forked(resume)]
    result = WENT_ON if ended else STARTED_AGAIN
    if digests != [expected]:
        result = LOST
    return {"number": number, "result": result, "sentence": ""}


def kills(number: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields what came of kills at operations in a workdir, drawn from all."""

    def undisturbed() -> Iterator[tuple[str, int]]:
        arm(folder / "counted", False, FOR_GOOD, 1, errno.EIO)
        yield run(make_trainer(), folder / "counted"), disarm()

    expected, total = next(forked(undisturbed))
    operations = range(total)
    drawn = random.Random(0).sample(operations, min(number, len(operations)))
    for operation in sorted(drawn):
        yield killed(operation, folder / f"run-{operation}", expected)


def copied(every: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields what came of the files that a kill at each operation would leave."""
    trainer = make_trainer()
    expected = run(trainer, folder / "expected")
    copies, workdir = folder / "copies", folder / "run"
    copies.mkdir()
    workdir.mkdir()
    ctypes.CDLL(None).faults_copies(os.fsencode(copies))
    arm(workdir, False, 0, FOR_GOOD, 0)
    run(trainer, workdir)
    for number in range(0, disarm(), every):
        result, sentence = STARTED_AGAIN, ""
        try:
            if run(trainer, copies / str(number)) != expected:
                result = LOST
        except Exception as error:
            result, sentence = LOST, f"{type(error).__name__}: {error}"
        yield {"number": number, "result": result, "sentence": sentence[:300]}
        shutil.rmtree(copies / str(number))


def outcomes(name: str, every: int, num_kills: int) -> Counter[str]:
    """Prints each run that a fault lost; returns the number of each result."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        folder = Path(scratch)
        if name == KILL:
            cases = kills(num_kills, folder)
        elif name == COPY:
            cases = forked(lambda: copied(every, folder))
        else:
            cases = tried(name, every, folder)
        for case in cases:
            counts[case["result"]] += 1
            if case["result"] == LOST:
                print(f"  {name} at {case['number']}: {case['sentence']}")
    return counts


def table(options: argparse.Namespace) -> bool:
    """Prints a line for each fault, and each that lost a run; True if none did."""
    print(f"{'fault':<28}{'tried':>7}{WENT_ON:>10}{STARTED_AGAIN:>16}{LOST:>7}")
    flags = [f"--every={options.every}", f"--kills={options.kills}"]
    command = [sys.executable, "-m", "benchmarks.faults", *flags]
    lost = 0

    def output(name: str) -> str:
        return subprocess.run(
            [*command, f"--row={name}"], stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    with ThreadPoolExecutor(options.parallel) as pool:
        # Kills first: they are the longest row.
        outputs = {name: pool.submit(output, name) for name in reversed(ROWS)}
        for name in ROWS:
            *lines, last = outputs[name].result().splitlines()
            counts = Counter(json.loads(last))
            row = f"{name:<28}{counts.total():>7}{counts[WENT_ON]:>10}"
            row += f"{counts[STARTED_AGAIN]:>16}{counts[LOST]:>7}"
            print(*lines, row, sep="\n", flush=True)
            lost += counts[LOST]
    return not lost


def leave_out_what_is_no_fault() -> None:
    """Lets runs be faster: no pictures, no waits, and one fingerprint of all."""
    sys.modules["matplotlib.figure"] = None  # An `ImportError`.
    # Else "for good" takes 7 s each, and 1 s more for each save that failed.
    checkpoint.RETRY_SECONDS, checkpoint.CLEARED_SECONDS = (0.0, 0.0, 0.0), 0.01
    digests: dict[str, str] = {}
    of = fingerprint.of

    def once(trainer: Trainer) -> dict[str, str]:
        digests.update(digests or of(trainer))
        return dict(digests)

    fingerprint.of = once


def main() -> None:
    """Starts rows in processes with the library preloaded, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--parallel", type=int, default=1 + os.cpu_count())
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        leave_out_what_is_no_fault()
        print(json.dumps(outcomes(options.row, options.every, options.kills)))
        return
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/faults.so"
        flags = ["-shared", "-fPIC", "-O1", f"-o{library}", str(SOURCE), "-ldl"]
        subprocess.run(["cc", *flags], check=True)
        os.environ |= {"LD_PRELOAD": library, "JAX_PLATFORMS": "cpu"}
        whole = table(options)
    sys.exit(0 if whole else 1)


if __name__ == "__main__":
    main()
