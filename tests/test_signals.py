"""Signals at every moment of every command: real processes, none of which ignores one.

A handler that raises is quiet where Python swallows what it raises: these are sent on
purpose, and others are spread over all that a run does.
"""

import contextlib
import errno
import gc
import io
import itertools
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from haiku_template import signals
from haiku_template.runs import stopping
from haiku_template.runs.stopping import StopSignals
from haiku_template.storage.workdir import saved_steps
from tests.runs import UNDRAWN
from tests.test_commands import digest, numbers

ROOT = Path(__file__).parents[1]
CODES = {"SIGTERM": 75, "SIGINT": 130, "SIGHUP": 75, "SIGUSR1": 75}
COMMANDS = ["train", "evaluate", "predict", "export", "convert", "prepare", "generate"]
COMMANDS += ["verify", "doctor", "checkpoints", "sweep", "new"]
# What runs in the background ignores SIGINT, and under nohup SIGHUP; so do children.
HEARS = """
import os, signal, sys
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"):
    signal.signal(signal.Signals[name], signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def start(*arguments, hears=HEARS, path=UNDRAWN, env=(), **options):
    own = {"PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-c", hears, *map(str, arguments)],
        text=True,
        stderr=subprocess.PIPE,
        env=os.environ | own | dict(env),
        **{"cwd": ROOT, "stdout": subprocess.PIPE} | options,
    )


def ended(process, seconds=100):
    try:
        output, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, output, errors


def assert_left(process, name, words=signals.ENDED):
    """It ended at once, in one sentence."""
    code, _, errors = ended(process)
    assert code == CODES[name], errors
    assert errors == f"error: {name} {words}\n"


# Where Python swallows what a handler raises, or takes it for something else.
SWALLOWED = """
import gc, os, signal, sys, weakref
from haiku_template import signals

signals.install()
number = signal.Signals[sys.argv[1]]
send = lambda *_: os.kill(os.getpid(), number)


class Value:
    pass


class Deleted:
    def __del__(self):
        send()


def in_gc():
    gc.callbacks.append(send)
    gc.collect()


def in_del():
    Deleted()


def in_weakref():
    value = Value()
    reference = weakref.ref(value, send)
    del value


def in_namedtuple():
    import collections

    sys.addaudithook(lambda event, _: event == "exec" and send())
    collections.namedtuple("Pair", "a b")  # Made by `eval`, which takes it for Ctrl-C.


def in_extension():
    sys.path.insert(0, sys.argv[3])
    sys.modules.pop("numbers", None)
    import decimal  # Its extension imports numbers, or else Python code is taken.


globals()[sys.argv[2]]()
print("still here")
"""
WHERE = ["in_gc", "in_del", "in_weakref", "in_namedtuple", "in_extension"]


@pytest.mark.parametrize("where", WHERE)
def test_a_signal_is_obeyed_where_python_swallows_exceptions(tmp_path, where):
    number = "import os, signal, sys; os.kill(os.getpid(), signal.Signals[sys.argv[1]])"
    (tmp_path / "numbers.py").write_text(f"{number}\nNumber = object\n")
    runs = {
        name: start("-c", SWALLOWED, name, where, tmp_path)
        for name in ("SIGTERM", "SIGINT")
    }
    for name, process in runs.items():
        assert_left(process, name)


def test_each_command_obeys_each_signal_from_its_first_import(tmp_path):
    files = [*(ROOT / "haiku_template").glob("[a-z]*.py")]
    runnable = {f.stem for f in files if "\nif __name__ ==" in f.read_text()}
    assert runnable == {*COMMANDS, "compat"}  # Which runs a script as Python does.
    kill = "import os, time\nos.kill(os.getpid(), int(os.environ['NUMBER']))\n"
    for first in ("absl", "argparse"):  # Imported first by most, and by the doctor.
        (tmp_path / f"{first}.py").write_text(kill + "print('still here')\n")
    for name in CODES:
        os.environ["NUMBER"] = str(int(signal.Signals[name]))
        try:
            modules = [f"haiku_template.{each}" for each in COMMANDS]
            runs = [start("-m", module, path=tmp_path) for module in modules]
        finally:
            del os.environ["NUMBER"]
        for command, process in zip(COMMANDS, runs, strict=True):
            trains = command == "train"  # The others have no checkpoint to resume.
            assert_left(
                process, name, signals.NOTHING_SAVED if trains else signals.ENDED
            )


IN_C = """
from haiku_template import signals

signals.install()
import ctypes, sys
from haiku_template import cli


def main(words):
    if "quiet" in words:
        signals.be_quiet()
    mutex = ctypes.create_string_buffer(64)  # Signals do not end a wait for it.
    print("in C", flush=True)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


cli.run(main, arguments=True)
"""


@pytest.mark.parametrize("name", [*CODES, "quiet"])
def test_a_command_is_left_while_its_main_thread_is_in_c(name):
    """As in a compilation; generate's Ctrl-C is quiet."""
    process = start("-c", IN_C, name)
    assert process.stdout.readline() == "in C\n"
    time.sleep(0.5)  # It is a few lines of Python before that, which obey.
    quiet = name == "quiet"
    process.send_signal(signal.SIGINT if quiet else signal.Signals[name])
    if not quiet:
        return assert_left(process, name)
    assert ended(process) == (130, "\n", "")


def test_all_commands_that_work_themselves_are_run_so():
    """The doctor, and `new`, wait for their children in Python."""
    calls = {x for x in COMMANDS if "cli.run(" in read_command(x)}
    assert calls == {*COMMANDS} - {"doctor", "new"}


def read_command(name):
    return (ROOT / "haiku_template" / f"{name}.py").read_text()


def test_importing_the_package_takes_no_signals():
    code = (
        "import signal\nbefore = [signal.getsignal(i) for i in range(1, 32)]\n"
        "import haiku_template.cli, haiku_template.signals, haiku_template.train\n"
        "assert before == [signal.getsignal(i) for i in range(1, 32)]"
    )
    assert ended(start("-c", code)) == (0, "", "")


def test_what_nohup_ignores_stays_ignored():
    ignoring = HEARS.replace("os.execv", "signal.signal(1, signal.SIG_IGN)\nos.execv")
    code = "from haiku_template import signals; import os, signal; signals.install()\n"
    code += "os.kill(os.getpid(), 1); print(signal.getsignal(1) == signal.SIG_IGN)"
    assert ended(start("-c", code, hears=ignoring)) == (0, "True\n", "")


ENDING = """
import atexit, os, sys
from haiku_template import cli, signals

signals.install()


class Value:
    def __del__(self, kill=os.kill, own=os.getpid()):
        for number in (15, 2, 1, 10):
            kill(own, number)


atexit.register(Value().__del__)


def main():
    print("done")
    if how == "error":
        raise cli.ConfigError("wrong")


sys.modules["kept"] = Value()  # Until the interpreter ends.
how = sys.argv.pop()
cli.run(main)
"""


@pytest.mark.parametrize(("how", "code"), [("done", 0), ("error", 64)])
def test_a_signal_at_its_end_does_not_change_what_a_command_says(how, code):
    found = ended(start("-c", ENDING, how))
    assert found == (code, "done\n", "error: wrong\n" * (how == "error"))


IN_LOOP = """
import gc, os, signal, sys
from haiku_template import signals
signals.install()
from pathlib import Path
from haiku_template.pretrained import new_file
from haiku_template.runs.stopping import StopSignals
from haiku_template.storage.workdir import saved_steps

with new_file(Path(sys.argv[1])) as file, StopSignals() as stops:
    file.write_bytes(bytes(1000))
    if sys.argv[2] == "again":
        stops.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops.due()
    gc.callbacks.append(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    gc.collect()
print("still here")
"""


@pytest.mark.parametrize("how", ["once", "again"])
def test_a_second_sigint_ends_a_run_and_nothing_half_written_stays(tmp_path, how):
    process = start("-c", IN_LOOP, tmp_path / "new/file", how)
    words = signals.AGAIN if how == "again" else signals.ENDED
    assert_left(process, "SIGINT", words)
    assert not list((tmp_path / "new").iterdir())


def test_a_converter_s_child_ends_with_it(tmp_path):
    """The child reads a file that is a pipe, which nobody fills."""
    source = tmp_path / "params.pkl"
    os.mkfifo(source)
    code = (
        "from haiku_template import signals; signals.install()\n"
        "import sys\n"
        "from haiku_template.pretrained import converting\n"
        "converting.is_file = lambda _: True; converting.convert(*sys.argv[1:])"
    )
    process = start("-c", code, source, tmp_path / "new/params.safetensors")
    deadline = time.monotonic() + 50
    while not children(process.pid):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    (child,) = children(process.pid)
    pipe = None
    while pipe is None:  # Until the child has opened it.
        assert process.poll() is None and time.monotonic() < deadline
        with contextlib.suppress(OSError):
            pipe = os.open(source, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.01)
    try:
        process.terminate()
        assert_left(process, "SIGTERM")
        assert not list((tmp_path / "new").iterdir())
        deadline = time.monotonic() + 10
        while is_alive(child):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.close(pipe)


FORKS = """
from haiku_template import signals
signals.install()
import multiprocessing, os, time

def child():  # Its handlers are its own by now.
    os.write(1, b"forked\\n")
    time.sleep(99)

multiprocessing.get_context("fork").Process(target=child).start()
os.write(1, b"noted\\n")  # By multiprocessing, which lists its children.
time.sleep(99)
"""


def test_children_of_other_modules_end_with_a_command():
    process = start("-c", FORKS)
    lines = {process.stdout.readline() for _ in range(2)}
    assert lines == {"forked\n", "noted\n"}
    (child,) = children(process.pid)
    process.terminate()
    process.wait(timeout=50)
    deadline = time.monotonic() + 10
    try:
        while is_alive(child):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        if is_alive(child):
            os.kill(int(child), signal.SIGKILL)
    assert_left(process, "SIGTERM")


def is_alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_script_s_own_handlers_come_back():
    heard = []

    def own(number, _):
        heard.append(number)

    numbers = [signal.Signals[name] for name in CODES]
    before = [signal.getsignal(number) for number in numbers]
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, own)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopSignals() as stops:
            stops.listen()
            signal.raise_signal(signal.SIGUSR1)  # It knows what for.
            assert heard == [signal.SIGUSR1] and not stops.due()
            signal.raise_signal(signal.SIGHUP)
            assert stops.due() and "SIGHUP received: step 3 is" in str(stops.error(3))
            signal.raise_signal(signal.SIGTERM)
            assert heard == [signal.SIGUSR1]
            signal.raise_signal(signal.SIGINT)  # The second that asks for an end.
            assert heard == [signal.SIGUSR1, signal.SIGINT]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        assert [signal.getsignal(n) for n in (15, 2, 10)] == [own] * 3
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("name", CODES)
def test_each_signal_is_noted_in_the_loop_and_where_exceptions_are_swallowed(name):
    number = signal.Signals[name]
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with StopSignals() as stops:
            stops.listen()
            raised = [number]
            gc.callbacks.append(lambda *_: raised and signal.raise_signal(raised.pop()))
            try:
                gc.collect()
            finally:
                gc.callbacks.pop()
            assert stops.due() and stops.error(1).exit_code == CODES[name]
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_outside_the_main_thread_signals_are_left_alone():
    before = [signal.getsignal(signal.Signals[name]) for name in CODES]
    after = []

    def listen():
        with StopSignals() as stops:
            stops.listen()
            after.extend(signal.getsignal(signal.Signals[name]) for name in CODES)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert after == before


def test_a_save_in_place_of_a_blocked_loop_says_one_line_of_a_device_s_error(
    monkeypatch,
):
    ends = []
    monkeypatch.setattr(signals, "end", lambda *end: ends.append(end))

    def save():
        raise jax.errors.JaxRuntimeError("INTERNAL: the card is gone\nframe\nframe")

    stops = StopSignals()
    stops.save = save
    stops._rescue("SIGTERM received", 75)
    ((sentence, code),) = ends
    assert sentence.startswith("SIGTERM received: the last state cannot be read")
    assert sentence.endswith("INTERNAL: the card is gone") and code == 75


@pytest.mark.parametrize("is_main", [True, False], ids=["main", "another thread"])
def test_who_may_note_finds_the_runtime_of_several_processes(monkeypatch, is_main):
    """A limit of minutes that passed by then: without it one process stopped alone."""
    told = []

    class Runtime:
        place = ""

        def __init__(self, stop):
            assert stop not in stopping.LISTENING.values()

        def tell(self):
            told.append("all")

        def restore(self):
            pass

    monkeypatch.setattr(stopping, "RuntimeHandler", Runtime)

    def look():
        with StopSignals(several=True) as stops:
            stops.listen()
            stopping.LISTENING[threading.get_ident()].note(signal.SIGUSR1)
            told.append(stops.received)

    if is_main:
        look()
    else:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert told == ["all", None]


STEPS = 3000
MOST_SECONDS = 5.0  # Of a processor, from a signal to the end: others use it, too.
FLAGS = [f"--config.num_steps={STEPS}", "--config.log_every=10"]
FLAGS += ["--config.eval_every=500", "--config.save_every=100"]


def train(workdir, cached=True):
    """Starts a run; without `cached`, one that compiles its programs as the first."""
    where = "--config=configs/digits.py", f"--workdir={workdir}"
    options = {"stdout": subprocess.DEVNULL}
    if not cached:
        options["env"] = {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    return start("-m", "haiku_template.train", *where, *FLAGS, **options)


def wait_until(process, reached, seconds=100):
    """Waits for `reached`; False if the process ended before."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return True


def catches(process):
    """True once the process has a handler of SIGTERM."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = re.search(r"SigCgt:\s*(\w+)", status)
    return caught is not None and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1


def steps_of(workdir):
    """Step of the newest line of metrics; 0 without any."""
    file = workdir / "metrics.jsonl"
    found = re.findall(r'"step": (\d+)', file.read_text()) if file.exists() else []
    return int(found[-1]) if found else 0


def cpu_seconds(process):
    """Seconds that a process and its ended children computed: others compute, too."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return 0.0
    return sum(map(int, fields.split()[11:15])) / os.sysconf("SC_CLK_TCK")


def children_seconds():
    """The same of all children that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run that nothing stops: seconds to its first step, in its loop, to its end."""
    workdir = tmp_path_factory.mktemp("measured") / "run"
    process, times = train(workdir, cached=False), []
    for reached in (
        lambda: catches(process),
        lambda: steps_of(workdir),
        lambda: steps_of(workdir) == STEPS,
    ):
        assert wait_until(process, reached)
        times.append(cpu_seconds(process))
    while process.poll() is None:
        times[3:] = [max([cpu_seconds(process), *times[3:]])]
    code, _, errors = ended(process)
    assert code == 0, errors
    spans = [later - first for first, later in itertools.pairwise(times)]
    return spans, digest(workdir), numbers(workdir)


def stop_at(workdir, name, when, seconds):
    """Starts a run, sends it a signal so long after what `when` says, and judges it."""
    before, first = children_seconds(), steps_of(workdir)
    process = train(workdir, cached=when != "start")
    reached = {
        "start": lambda: catches(process),
        "loop": lambda: steps_of(workdir) > first,
        "end": lambda: steps_of(workdir) == STEPS,
    }[when]
    assert wait_until(process, reached)
    at = cpu_seconds(process) + seconds
    is_running = wait_until(process, lambda: cpu_seconds(process) >= at)
    done, at = steps_of(workdir), cpu_seconds(process)
    process.send_signal(signal.Signals[name])
    code, _, errors = ended(process)
    assert is_running or when != "start"
    if is_running and when != "end":  # There it may have its report to draw.
        used = children_seconds() - before - at
        assert used < MOST_SECONDS, used
    # At the end of a run there may be nothing left to stop.
    whole = done > STEPS - 200 and (workdir / f"checkpoints/{STEPS}").is_dir()
    assert code == CODES[name] or (code == 0 and whole), (code, errors)
    said = errors.splitlines()[-1:]  # After warnings, as of another commit.
    assert "Traceback" not in errors and errors.count("error: ") == (code != 0), errors
    assert code == 0 or said[0].startswith(f"error: {name} received"), errors
    if when == "loop" and code:
        assert "is saved, and the same command resumes it" in errors
    return when, name, round(seconds, 2), done, code


def finish(workdir, measured):
    """Lets a stopped run end: it is, bitwise, as one that nothing stopped."""
    code, _, errors = ended(train(workdir))
    assert code == 0, errors
    assert (digest(workdir), numbers(workdir)) == measured[1:]


def stop_often(tmp_path, measured, when, count):
    """Stops runs at moments of a part of them, and lets them end."""
    span, names = measured[0][WHEN.index(when)], itertools.cycle(["SIGTERM", "SIGINT"])
    workdir, moments = tmp_path / when, []
    for i in range(count):
        # A stopped run resumes: the next has the rest of its loop.
        share = (i + 0.5) / count if when != "loop" else 0.6 / count
        moments.append(stop_at(workdir, next(names), when, span * share))
        # A resumed start has steps behind it, and reaches its end before the moment.
        if steps_of(workdir) == STEPS or (when == "start" and saved_of(workdir)):
            finish(workdir, measured)
            workdir = tmp_path / f"{when}{i}"
    if workdir.exists():
        finish(workdir, measured)
    print(*moments, sep="\n")


WHEN = ["start", "loop", "end"]


@pytest.mark.slow
def test_eight_moments_of_a_run(tmp_path, measured):
    for when, count in zip(WHEN, (4, 3, 1), strict=True):
        stop_often(tmp_path, measured, when, count)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("when", "count"), [*zip(WHEN, (40, 40, 10), strict=True)])
def test_ninety_moments_of_a_run(tmp_path, measured, when, count):
    """C13, C15: before the first step, in the loop, and at the end."""
    stop_often(tmp_path, measured, when, count)


def saved_of(workdir):
    """Newest step that was saved whole; 0 without any."""
    return max(saved_steps(workdir / "checkpoints"), default=0)


def kill_often(tmp_path, measured, count):
    """Kills one run again and again, with SIGKILL at moments from its start on."""
    workdir, rng = tmp_path / "run", random.Random(0)
    start, *_ = measured[0]
    for i in range(count):
        before, first, process = saved_of(workdir), steps_of(workdir), train(workdir)
        at = rng.uniform(0.0, start)
        last = first + rng.uniform(0.5, 1.2) * STEPS / count  # There is enough for all.
        wait_until(
            process,
            lambda: cpu_seconds(process) >= at or steps_of(workdir) >= last,  # noqa: B023
        )
        process.kill()
        ended(process)
        print(i, round(at, 2), before, steps_of(workdir), saved_of(workdir))
        assert saved_of(workdir) >= before
        # A save every 100 steps, of which the last may be under way.
        assert saved_of(workdir) >= steps_of(workdir) - 210
    assert saved_of(workdir) < STEPS
    finish(workdir, measured)


@pytest.mark.slow
def test_a_run_that_is_killed_four_times(tmp_path, measured):
    """C02: the form of the next one that takes seconds."""
    kill_often(tmp_path, measured, 4)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_run_that_is_killed_fifty_times(tmp_path, measured):
    """C02: with no manual step, it ends as one that nothing killed."""
    kill_often(tmp_path, measured, 50)


@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.EAGAIN, errno.ENOSPC])
def test_an_error_of_another_file_is_none_of_what_is_printed(capfd, number):
    assert not signals.is_of_output(OSError(number, "another"))
    assert capfd.readouterr().out.strip() == ""
    with contextlib.redirect_stdout(io.StringIO()):  # Which is no file.
        assert not signals.is_of_output(OSError(number, "another"))
