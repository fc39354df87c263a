"""Signals that end a command, whose handlers never raise.

Why: docs/decisions/storage.md#signal-handlers. Imports the standard library alone, so
that a command calls it before other imports.
"""

import _thread
import atexit
import contextlib
import errno
import io
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

PREEMPTED, STALLED, INTERRUPTED = 75, 76, 130
RESUMED = {PREEMPTED, STALLED, INTERRUPTED}  # By the same command.
EXIT_CODES = {signal.SIGTERM: PREEMPTED, signal.SIGINT: INTERRUPTED}
# The second is Slurm's custom for a time limit that is near.
EXIT_CODES |= {signal.SIGHUP: PREEMPTED, signal.SIGUSR1: PREEMPTED}
ENDED = "received: the command has ended before it was done"
NOTHING_SAVED = (  # Of training.
    "received while nothing was being trained, and nothing new was saved; the same "
    "command resumes the last checkpoint, or begins anew without one"
)
AGAIN = "received again: what was not saved by then is lost; the same command resumes "
AGAIN += "the last checkpoint"
# Errors of a disk, or of a file that is closed, beneath what is printed.
UNWRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
PRINT_SECONDS = 1.0  # Nobody may read what is printed.
# Seconds in which the main thread may obey, unless it sits in C; and a second signal.
PATIENCE, SECOND_PATIENCE = 2.0, 0.5
# Each is called with the sentence and the exit code at a forced end, the newest first.
CALLED: list[Callable[[str, int], object]] = []
_SENTENCES = [ENDED]  # Of `leave`, the last.
_ENDING: list[str] = []  # Sentences with which this process ends.
# Each is called with the number of a signal, in the thread that `watch` starts.
HEARERS: list[Callable[[int], object]] = []
# And each of these once in so many seconds, in the same thread.
LOOKERS: list[Callable[[], object]] = []
LOOK_SECONDS = 1.0
RESCUES: list[Any] = []  # Of a process of several: `cluster/rescue.py`.
_PYTHONS = (signal.SIG_DFL, signal.default_int_handler)


def install(*sentences: str) -> None:
    """Makes signals end this command at once, in a sentence, until the loop notes them.

    What is ignored, as by nohup, or has a handler already, stays so.
    """
    _SENTENCES.extend(sentences)
    for number in EXIT_CODES:
        if is_free(number):
            signal.signal(number, leave)
    # `end` sends SIGTERM to the children that other modules forked.
    os.register_at_fork(after_in_child=_reset)
    atexit.register(_finish)  # The first that is registered is the last to run.


def are_installed() -> bool:
    """True if `install` was called, and no other handler took its place."""
    return signal.getsignal(signal.SIGTERM) is leave


def is_free(number: int) -> bool:
    """True if a signal has Python's handler, or a command's."""
    return signal.getsignal(number) in (*_PYTHONS, leave)


def leave(number: int, _: FrameType | None, sentence: str = "") -> None:
    """Handler that ends the process with a sentence, by default that of `called`."""
    name = signal.Signals(number).name
    end(f"{name} {sentence or _SENTENCES[-1]}", EXIT_CODES[number])


# Why: docs/decisions/storage.md#watcher
def watch() -> None:
    """Starts a thread that hears signals also while the main thread sits in C.

    Where an event loop hears signals in the same way, nothing is done.
    """
    if HEARERS:
        return
    _fill_standard_files()
    source, target = os.pipe()
    os.set_blocking(target, False)
    if (previous := signal.set_wakeup_fd(target, warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(previous)
        return os.close(source) or os.close(target)
    HEARERS.append(_end_late)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    _thread.start_new_thread(_hear, (source,))


def _hear(source: int) -> None:
    poll = select.poll()
    poll.register(source, select.POLLIN)
    while True:
        numbers = os.read(source, 1) if poll.poll(1000 * LOOK_SECONDS) else ()
        for number in numbers:
            for call in [*HEARERS]:
                call(number)
        for look in [*LOOKERS]:
            look()


def _end_late(number: int) -> None:
    """Ends a command, unless its main thread does it meanwhile."""
    handler = signal.getsignal(number)
    if handler in (leave, _leave_quietly):
        time.sleep(PATIENCE)
        if signal.getsignal(number) is handler and not _ENDING:
            handler(number, None)


def end_late(sentence: str, code: int) -> None:
    """Ends this process, unless another thread does."""
    if not _ENDING:
        end(sentence, code)


def be_quiet() -> None:
    """Makes Ctrl-C end a command without a word: it prints a text as it comes."""
    if is_free(signal.SIGINT):
        signal.signal(signal.SIGINT, _leave_quietly)


def _leave_quietly(number: int, _: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(1, b"\n")
    os._exit(EXIT_CODES[number])


def _fill_standard_files() -> None:
    """Opens those of the files 0, 1 and 2 that are closed, as `2>&-` leaves them.

    Else the next files have their numbers, and what XLA says on 2 is written there.
    """
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)


def say(line: str) -> None:
    """Prints a line on standard error; nothing ends otherwise where it cannot."""
    with contextlib.suppress(OSError, ValueError):  # A full disk; nobody reads it.
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def closed_pipes() -> Iterator[None]:
    """Context of a command: one that prints to who reads no more ends quietly."""
    if sys.stdout is None:  # As `>&-` leaves it: what prints needs a file.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until this process ends
    if isinstance(sys.stdout, io.TextIOWrapper):  # No letter ends a run for its name.
        sys.stdout.reconfigure(errors="backslashreplace")  # As standard error does.
    try:  # Python makes an error of SIGPIPE, and another one as it ends.
        yield
    except BrokenPipeError:
        if not _output_is_lost():  # It was another pipe.
            raise
        sys.exit(0)
    finally:
        try:
            print(end="", flush=True)
        except (OSError, ValueError):
            _output_is_lost()


def is_of_output(error: OSError) -> bool:
    """Tests whether standard output cannot be written: then it goes nowhere."""
    if error.errno not in UNWRITTEN:
        return False
    try:  # Not by `flush`, which has forgotten what failed.
        os.write(sys.stdout.fileno(), b"\n")
    except (OSError, ValueError) as again:  # A ValueError's is of no file.
        if getattr(again, "errno", None) == error.errno:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return True
    return False


def _output_is_lost() -> bool:
    """Tests whether nobody reads standard output any more; then it goes nowhere."""
    try:
        sys.stdout.flush()
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        is_gone = any(event & select.POLLERR for _, event in poll.poll(0))
    except BrokenPipeError:
        is_gone = True
    except (AttributeError, OSError, ValueError):  # It is none, or no file.
        return False
    if is_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_gone


def end(sentence: str, code: int) -> None:
    """Ends this process at once: says why, and calls what is in `CALLED`."""
    try:
        _ENDING.append(sentence)
        called, CALLED[:] = CALLED[::-1], []  # A second signal does not wait.
        with contextlib.suppress(OSError, ValueError):
            if select.select([], [2], [], PRINT_SECONDS)[1]:
                os.write(2, f"error: {sentence}\n".encode())
        if workers := sys.modules.get("multiprocessing"):
            called += [lambda *_: [x.terminate() for x in workers.active_children()]]
        for call in called:
            with contextlib.suppress(Exception):
                call(sentence, code)
    finally:
        os._exit(code)


@contextlib.contextmanager
def called(call: Callable[[str, int], object], sentence: str = "") -> Iterator[None]:
    """Context in which `call` is called if a signal ends this process: to clean up."""
    CALLED.append(call)
    _SENTENCES.append(sentence or _SENTENCES[-1])
    try:
        yield
    finally:
        _SENTENCES.pop()
        with contextlib.suppress(ValueError):
            CALLED.remove(call)


def ignore() -> None:
    """Ignores signals but a second SIGINT, as the command ends by itself."""
    for number in EXIT_CODES:
        if signal.getsignal(number) is leave:
            is_first = number == signal.SIGINT
            signal.signal(number, _ignore_first if is_first else signal.SIG_IGN)


def _ignore_first(number: int, _: FrameType | None) -> None:
    signal.signal(number, lambda *_: os._exit(EXIT_CODES[number]))


def _finish() -> None:
    """Ignores signals, whose handlers Python takes away before its end."""
    for number in EXIT_CODES:
        if signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)


def _reset() -> None:
    """Restores Python's handlers in a forked data worker, which saves nothing."""
    for number in EXIT_CODES:
        if signal.getsignal(number) is leave:
            quiet = number == signal.SIGINT  # A terminal tells all of its group.
            signal.signal(number, signal.SIG_IGN if quiet else signal.SIG_DFL)
