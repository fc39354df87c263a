"""Worker processes, which make the batches of a run ahead of it: `data.workers`.

Why: docs/decisions/data.md#workers
"""

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from haiku_template.data import shared
from haiku_template.data.dataset import Batch, Data
from haiku_template.data.worker import EVALUATION, HEADER, TRAIN, digests, sets_of
from haiku_template.errors import ConfigError, DataError
from haiku_template.signals import EXIT_CODES

logger = logging.getLogger(__name__)

AHEAD = 2  # Batches that each process is asked for ahead of time.
MOST_DEATHS = 3  # Of one worker in a row, which is replaced so often.
SLOW_SECONDS = 60.0  # Of waiting for a process, until a line says so, and again.
END_SECONDS = 5.0  # Of waiting for a process that has been told to end.
MODULE = "haiku_template.data.worker"
PLAIN = str, int, float, list  # Types of flags' values that other processes can read.
Key = tuple[str, int]  # Name of a set, index of a batch.


def in_workers(
    count: int, function: Callable[..., Data], *args: Any, **kwargs: Any
) -> Data:
    """Makes `Data` whose batches come from `count` processes while a run reads them.

    They are the same as without, in the same order. Each process calls `function` with
    the arguments once more, so that all can be pickled: a function of a module, and not
    of a notebook or a script. Raises `ConfigError` for no whole number from 0, what
    cannot be pickled, or batches that only go forward.
    """
    if type(count) is not int or count < 0:
        raise ConfigError(
            f"config.data.workers={count!r}; possible is a whole number from 0, which "
            "is no process beside the run's own"
        )
    data = function(*args, **kwargs)
    if count == 0:
        return data
    if getattr(data.train, "once", False):
        raise ConfigError(
            f"config.data.workers={count} cannot be had with batches that only go "
            "forward, as from_iterator's: give the library that makes them workers of "
            "its own, as torch's DataLoader(num_workers=...), and 0 here"
        )
    workers = Workers(count, (function, args, kwargs))
    sets = {k: WorkersDataset(x, k, workers) for k, x in sets_of(data).items()}
    return data._replace(
        train=sets.pop(TRAIN),
        evaluation=sets.pop(EVALUATION, None),
        evaluations={name.partition("/")[2]: x for name, x in sets.items()},
    )


class WorkersDataset:
    """Data set whose batches come from workers, in `read_ahead` and in order.

    Any other is made in this process, by `dataset`, which has all other attributes.
    """

    def __init__(self, dataset: Any, name: str, workers: "Workers") -> None:
        self.dataset, self._name, self._workers = dataset, name, workers
        self._next, self._last, self._stop = -1, 0, 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # While it is copied.
            raise AttributeError(name)
        return getattr(self.dataset, name)

    @property
    def note(self) -> str:
        """Facts for the first lines of a run."""
        count = f"{(n := self._workers.count)} worker processes make batches"
        count = count if n > 1 else "1 worker process makes batches"
        return "; ".join(filter(None, (getattr(self.dataset, "note", ""), count)))

    def batch(self, index: int) -> Batch:
        """Makes a batch, or takes it from the process that has made it."""
        with self._lock:
            is_next = index == self._next < self._stop
            if is_next:
                self._next += 1
                self._ask()
        if not is_next:
            return self.dataset.batch(index)
        return self._workers.of(index).batch((self._name, index))

    @contextlib.contextmanager
    def read_ahead(self, start: int, stop: int) -> Iterator[None]:
        """Context in which workers make batches `start` to `stop - 1` ahead of time."""
        with self._workers.running((self._name, start), self.dataset):
            self._last, self._stop, self._next = start, stop, start
            self._ask()
            try:
                yield
            finally:
                self._next = -1

    def _ask(self) -> None:
        stop = min(self._next + AHEAD * self._workers.count, self._stop)
        for index in range(self._last, stop):
            self._workers.of(index).ask((self._name, index))
        self._last = max(self._last, stop)


class Workers:
    """Processes that make batches, in turns: batch i comes from process i % count."""

    def __init__(self, count: int, call: tuple[Callable[..., Data], Any, Any]) -> None:
        self.count, self._call = count, call
        _check_call(call)
        self._contexts, self._workers = 0, []
        self._setup: BinaryIO | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def running(self, key: Key, dataset: Any) -> Iterator[None]:
        """Context in which the processes run; inner ones use those of the outer one.

        They check that they make the batch `key` as `dataset` does here.
        """
        try:
            with self._lock:
                self._contexts += 1
                if self._contexts == 1:
                    self._start(key, dataset)
            yield
        finally:
            with self._lock:
                self._contexts -= 1
                if not self._contexts:
                    self._end()

    def _start(self, key: Key, dataset: Any) -> None:
        self._setup, sections = shared.write((_given_flags(), *self._call, *key))
        self._workers = []
        for number in range(1, self.count + 1):
            self._workers.append(Worker(number, self._setup, sections))
        expected = digests(dataset.batch(key[1]))  # While they start.
        for worker in self._workers:
            worker.expect(key, expected)

    def _end(self) -> None:
        for worker in self._workers:
            worker.tell_to_end()
        for worker in self._workers:
            worker.end()
        if self._setup is not None:
            self._setup.close()

    def of(self, index: int) -> "Worker":
        """Process that makes the batches of this number."""
        return self._workers[index % self.count]


class Worker:
    """A process that makes the batches it is asked for, in order.

    One that dies is replaced, and makes them again: they are functions of the index.
    """

    def __init__(self, number: int, setup: BinaryIO, sections: int) -> None:
        self._number, self._setup, self._sections = number, setup, sections
        self._lock, self._ends, self._deaths = threading.Lock(), False, 0
        self._requests: list[Key] = []
        self._answers: dict[Key, Any] = {}
        self._start()

    def expect(self, key: Key, expected: dict[str, str]) -> None:
        """Sets the digests of the batch `key`, which the process makes first."""
        self._first_key, self._expected = key, expected

    def ask(self, key: Key) -> None:
        """Asks for a batch, to be taken later."""
        with self._lock:
            self._requests.append(key)
            self._send(key)

    def batch(self, key: Key) -> Batch:
        """Takes a batch once it is made; raises the error of that, or `DataError`."""
        with self._lock:
            while key not in self._answers:
                self._receive()
            is_error, value = self._answers.pop(key)
        if is_error:
            value.add_note(f"in data worker {self._number}, of {_described(key)}")
            raise value
        return value

    def tell_to_end(self) -> None:
        """Ends the requests, and with them the process."""
        self._ends = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # Also wakes who waits.

    def end(self) -> None:
        """Waits for the end of the process, and kills it if there is none."""
        with self._lock:
            self.tell_to_end()  # Another one may have been started since.
            self._exit_code()
            self._socket.close()

    def _start(self) -> None:
        self._socket, of_process = socket.socketpair()
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", MODULE]
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        # JAX, if a user's module imports it, is not to take a device of the run.
        env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        # The new process leaves the signals that end a run to the run.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_CODES)
        try:
            with of_process:
                files = of_process.fileno(), self._setup.fileno()
                self._process = subprocess.Popen(
                    [*command, *map(str, files), str(self._sections)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=files,
                    env=env,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._is_ready = False
        for key in self._requests:
            self._send(key)

    def _send(self, key: Key) -> None:
        with contextlib.suppress(OSError):  # Of a dead process, as `_receive` finds.
            self._socket.sendall(json.dumps(key).encode() + b"\n")

    def _receive(self) -> None:
        header, files = b"", []
        with contextlib.suppress(OSError, ValueError):  # Of a closed socket.
            self._wait()
            header, files, *_ = socket.recv_fds(self._socket, HEADER.size, 1)
        if not header:
            return self._replace()
        is_error, count = HEADER.unpack(header)
        try:
            value = shared.read(files[0], count)
        except (IndexError, OSError) as error:
            raise DataError(
                "a batch of a data worker cannot be read: too many files are open, of "
                "which each batch is one while it is held; hold fewer, or raise the "
                "limit (ulimit -n)"
            ) from error
        if self._is_ready:
            self._answers[self._requests.pop(0)] = is_error, value
            self._deaths = 0  # The next may be of another batch, a week later.
        elif is_error:
            value.add_note(f"in data worker {self._number}, which makes the data again")
            raise value
        else:
            self._check(value)
            self._is_ready = True

    def _wait(self) -> None:
        """Waits for an answer or the end, and says what takes long."""
        poll, seconds = select.poll(), 0.0
        poll.register(self._socket, select.POLLIN)
        while not poll.poll(1e3 * SLOW_SECONDS):
            seconds += SLOW_SECONDS
            logger.warning("%s is at %s for %g s", self._name, self._work, seconds)

    @property
    def _name(self) -> str:
        return f"data worker {self._number}, process {self._process.pid},"

    @property
    def _work(self) -> str:
        if not self._is_ready:
            return "its data and first batch"
        return _described(self._requests[0]) if self._requests else "no batch"

    def _check(self, actual: dict[str, str]) -> None:
        expected = self._expected
        if paths := [k for k in expected | actual if expected.get(k) != actual.get(k)]:
            raise ConfigError(
                f"{paths[0] or 'the array'} of {_described(self._first_key)} differs "
                f"in data worker {self._number} from that of the run itself; a batch "
                "is a function of its number alone: draw from np.random.default_rng("
                "(seed, step)), and sort what comes from sets or folders"
            )

    def _replace(self) -> None:
        code = self._exit_code()
        if self._ends:
            raise DataError("the data workers have ended: nobody reads batches now")
        fact = f"{self._name} {_end(code)} at {self._work}"
        if self._deaths == MOST_DEATHS:
            raise DataError(
                f"{fact}; it is not replaced again, after {MOST_DEATHS} times"
            )
        self._deaths += 1
        logger.warning("%s; another one takes its place", fact)
        self._socket.close()
        self._start()

    def _exit_code(self) -> int:
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _given_flags() -> dict[str, Any]:
    """Values of absl's flags that are no defaults, for the code that makes the data."""
    if (absl := sys.modules.get("absl.flags")) is None:
        return {}
    every = {name: absl.FLAGS[name] for name in absl.FLAGS}
    return {
        name: flag.value
        for name, flag in every.items()
        if isinstance(flag.value, PLAIN) and flag.value != flag.default
    }


def _check_call(call: Any) -> None:
    """Raises `ConfigError` unless another process can make the same call."""
    advice = (
        "give in_workers, or a config, a function of a module, which each worker "
        "process imports, and arguments that can be pickled; or set data.workers to 0"
    )
    try:
        stream = shared.pickled(call)
    except Exception as error:
        raise ConfigError(f"data workers cannot be had: {error}; {advice}") from error
    if b"__main__" in stream:
        raise ConfigError(
            "data workers cannot be had of a function or a class of a script or a "
            f"notebook, __main__; {advice}"
        )


def _described(key: Key) -> str:
    name, index = key
    if name == TRAIN:
        return f"the {name} batch of step {index + 1}"
    return f"batch {index} of {name}"


def _end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    advice = ", as the system does where memory is short," * (code == -signal.SIGKILL)
    return f"was ended by {signal.Signals(-code).name}{advice}"
