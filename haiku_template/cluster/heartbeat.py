"""Heartbeat: when a process of a run is lost, the others end and name it.

A collective with a process that is gone may wait for ever, and JAX's runtime looks for
one after 100 s. So both ends of each connection of the rendezvous send an empty line a
second, and a line of JSON before they end: process 0 is connected to all others, and
tells them which of them it lost. A process that has waited too long in a collective
says so in its beats, so that a hanging main thread, or a cut link between two other
processes, ends the run, too.
"""

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from haiku_template import errors, signals
from haiku_template.cluster import identity
from haiku_template.cluster.rendezvous import Peer
from haiku_template.cluster.rescue import Rescue

BEAT_SECONDS, SILENT_SECONDS = 1.0, 30.0  # Why: docs/decisions/cluster.md#heartbeat
LEAVE_SECONDS = 15.0  # For the main thread to end by itself, also after a save.
PRINT_SECONDS = 5.0  # Nobody may read what is printed.
GATHER_SECONDS = 15.0  # From the first that is stalled to the last.
FINISHED_SECONDS = 10.0  # In a collective, after another process has finished.
LONGEST = 400  # Characters of a process's own error.
LONGEST_FAULT = 2_000  # Characters of what is said of another.
STALL = "--stall_seconds={:g}"  # Why: docs/decisions/cluster.md#watchdog
# Exit codes of errors that would come again, and of a preempted run: the others end
# with them, too, since Slurm goes by the highest of all.
LASTING = {errors.ConfigError.exit_code, errors.NonFiniteError.exit_code}
LASTING |= {errors.StorageError.exit_code, errors.MemoryFullError.exit_code}
LASTING |= {signals.PREEMPTED}  # Why: docs/decisions/cluster.md#preempted-start


class Heartbeat:
    """Watches the processes at the other ends of connections, in threads.

    Attributes:
      fault: sentence on the first process that was lost; "" for none.
      exit_code: of this process, once its own sentence is printed; 0 before.
      fault_code: exit code for that fault: 69, or the other's if it is in `LASTING`.
      waited: gives the seconds for which this process has waited in a collective.
      stall_seconds: limit of that; others may compile or save meanwhile.
      limit: words for it.
      resumes: True if the run has a checkpoint to resume from.
      parted: ends the watch, once all have left and JAX's runtime is shut down.
    """

    def __init__(self, peers: Sequence[Peer], index: int) -> None:
        self.peers, self.index, self.fault, self.exit_code = peers, index, "", 0
        self.fault_code = errors.DeviceError.exit_code
        self.waited: Callable[[], float] = lambda: 0.0
        self.stall_seconds, self.limit = 1800.0, STALL
        self.resumes: Callable[[], bool] = lambda: True
        self._stalled: dict[str, float] = {}  # Names, and when each first said so.
        self._finished: dict[str, float] = {}  # Names, and when each left in order.
        self._found, self.parted = threading.Event(), threading.Event()
        self._first, self._left = threading.Lock(), threading.Lock()
        self._latest = math.inf
        self.rescue = Rescue(self)
        self.references: Any = None  # Kept alive as long as the threads.
        for peer in peers:
            peer.link.settimeout(SILENT_SECONDS)
        # A child would keep the connections of a process that was killed.
        os.register_at_fork(after_in_child=self._close)
        identity.run(self._beat)
        for peer in peers:
            identity.run(self._listen, peer)

    def leave(self, error: str = "") -> None:
        """Tells the others, once, that this process ends: in order, or by an error."""
        if self._left.acquire(blocking=False):
            summary = " ".join(error.split())[:LONGEST]
            self.send({"left": summary, "code": self.exit_code})

    @contextlib.contextmanager
    def waiting(self, seconds: float, limit: str) -> Iterator[None]:
        """Context in which this process waits for the others, `seconds` at most."""
        before, begun = (self.waited, self.stall_seconds, self.limit), time.monotonic()
        self.stall_seconds, self.limit = seconds, limit
        self.waited = lambda: time.monotonic() - begun
        try:
            yield
        finally:
            self.waited, self.stall_seconds, self.limit = before

    def wait_for_fault(self) -> str:
        """Waits until a process is known to be lost; "" if none is."""
        self._found.wait(SILENT_SECONDS + BEAT_SECONDS)
        return self.fault

    @property
    def _patience(self) -> float:
        """Seconds to wait for others: process 0 may write a save, and one before it."""
        return self.stall_seconds + 2 * self.rescue.seconds

    def _beat(self) -> None:
        while time.monotonic() < self._latest:
            stalled = self.waited() > self._patience
            self.send({"stalled": "all"} if stalled else None)
            if self.index == 0:
                self._note("process 0", stalled)
            since = time.time() - min(self._finished.values(), default=math.inf)
            if min(since, self.waited()) > FINISHED_SECONDS:
                identity.run(self._lose, self._finish())
            time.sleep(BEAT_SECONDS)
        os._exit(self.exit_code or self.fault_code)

    def _note(self, name: str, stalled: bool) -> None:
        """Records stalled processes in process 0, and ends the run a little later."""
        if not stalled:
            self._stalled.pop(name, None)
            return
        first = self._stalled.setdefault(name, time.monotonic())
        if time.monotonic() - first > GATHER_SECONDS and not self._found.is_set():
            identity.run(self._lose, self._stall())

    def _stall(self) -> str:
        """Sentence for a stalled run: names the processes that do not wait."""
        names = ["process 0", *(peer.name for peer in self.peers)]
        busy = [name for name in names if name not in self._stalled]
        since = _clock(time.time() - self._patience)
        limit, saves = self.limit.format(self.stall_seconds), 2 * self.rescue.seconds
        limit += f" and {saves:.0f} s for saves" * (saves > 1)
        if not busy:
            return (
                f"all processes have waited for each other since {since}: the network "
                "between two of them failed, or they do not compute the same"
            )
        return (
            f"{', '.join(busy)} did not go on, and the others have waited since "
            f"{since}: a main thread hangs, or takes more than {limit}"
        )

    def _finish(self) -> str:
        """Sentence for a process that finished while this one waits for it."""
        name, when = next(iter(self._finished.items()))
        return (
            f"{name} finished at {_clock(when)}, and process {self.index} waits for "
            "it: it returned early, or was started with another option, as --dry_run"
        )

    def send(self, message: Any = None, peers: Sequence[Peer] | None = None) -> None:
        """Sends a message that JSON can hold, or a beat, to all peers or to some."""
        text = json.dumps(message) if message else ""
        for peer in self.peers if peers is None else peers:
            with contextlib.suppress(OSError):
                peer.link.sendall(text.encode() + b"\n")

    def _listen(self, peer: Peer) -> None:
        """Reads a peer's messages until it ends, or reports a lost process."""
        heard, text, lost, code = time.time(), b"", "", None
        try:
            while not lost and (piece := peer.link.recv(identity.LONGEST)):
                heard = time.time()
                *lines, text = (text + piece).split(b"\n")
                text = text.lstrip(b" ")  # Beats of its helper.
                if len(text) > identity.LONGEST:
                    raise ValueError("a line without an end")
                for line in lines:
                    if not lost:
                        lost, code = self._heed(peer, line)
        except ConnectionError:
            pass  # As where it ends without a word: it was killed.
        except OSError:
            lost = (
                f"nothing was heard of {peer.name} since {_clock(heard)}: it is "
                "stopped, or its machine or the network failed"
            )
        except Exception as error:  # Nothing that it sends may end the watch.
            lost = (
                f"{peer.name} sent what is no heartbeat's at {_clock(heard)} ({error}):"
                " another program, or the network, has written into its connection"
            )
        self._lose(lost or f"{peer.name} was killed at {_clock(time.time())}", code)

    def _heed(self, peer: Peer, line: bytes) -> tuple[str, int | None]:
        """Parses a message: fault of a lost process, "" for none, and its exit code.

        Raises any exception for a line that no process writes.
        """
        message = json.loads(line) if line.strip() else {}
        if self.index == 0:
            self._note(peer.name, "stalled" in message)
        code = message.get("code")
        if not isinstance(code, int | None):
            raise TypeError(f"an exit code of {str(code)[:20]}")
        if rescue := message.get("rescue"):
            self.rescue.heed(peer, *rescue)
        if lost := message.get("lost"):
            return str(lost), code
        if error := message.get("left"):
            return f"{peer.name} ended at {_clock(time.time())}: {error}", code
        if "left" in message:  # It waits in JAX's shutdown for all.
            self._finished[peer.name] = time.time()
        return "", None

    def _lose(self, fault: str, code: int | None = None) -> None:
        """Ends this process, after some seconds in which it may end by itself.

        `code` is the exit code of another process that ended by itself.
        """
        if not self._first.acquire(blocking=False):
            return
        self.fault = fault = identity.printable(fault)[:LONGEST_FAULT]
        if code in LASTING:
            self.fault_code = code
        # From process 0 it reaches all; process 0 ignores it.
        self.send({"lost": fault, "code": self.fault_code})
        self._found.set()
        if self.parted.wait(LEAVE_SECONDS):
            return
        if self.rescue.has_waited() and self.parted.wait(LEAVE_SECONDS):
            return
        self._latest = time.monotonic() + PRINT_SECONDS
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            if not self.exit_code:
                print(f"error: {self.sentence()}", file=sys.stderr, flush=True)
        os._exit(self.exit_code or self.fault_code)

    def sentence(self) -> str:
        """Sentence of the fault, with how to resume where that can help."""
        # Why: docs/decisions/cluster.md#resumes
        if self.fault_code in LASTING or not self.resumes():
            return self.fault
        advice = "the same command in all processes resumes the last checkpoint"
        return f"{self.fault}; {advice}"

    def _close(self) -> None:
        for peer in self.peers:
            if (number := peer.link.detach()) >= 0:  # A child's child has none.
                os.close(number)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
