"""One of two processes is blocked, or its code raises: the state of both is saved.

Rows C13, C15 and C16 of the reliability bench. Real processes and signals.
"""

import signal
import time

import pytest

from tests.cluster.test_sharded_processes import ALL, saved
from tests.storage.test_verified import bits
from tests.test_blocked import BLOCKED, digest, ended, numbers, reach, start

pytestmark = pytest.mark.cluster
# As each process reads its share of a batch, and process 0 the whole for its digest.
INIT = ".dataclass(init=False)\n"
SHARES = """    at: int

    def __init__(self, dataset, where, at, spec=None):
        self.where, self.at = where, at
        self.dataset = dataclasses.replace(dataset, **{"spec": spec} if spec else {})
"""


RAISES = 'if HOW == "raises":\n            raise OSError("the disk is gone")\n        '


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocked")
    text = BLOCKED.replace("SLEEP", "0.0").replace("FORCE_SECONDS, ", "_, ")
    text = text.replace("    at: int\n", SHARES).replace(".dataclass\n", INIT)
    text = text.replace('if HOW != "in C":', RAISES + 'if HOW != "in C":')
    (folder / "blocked.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def plain(folder, free):
    """What a run of two leaves that nothing stopped."""
    results = [ended(x) for x in begin(folder, "plain", free())]
    assert [code for code, _ in results] == [0, 0], results
    return digest(folder / "plain"), numbers(folder / "plain")


def begin(folder, name, address, index=None, where="", how="", **changes):
    """Starts two processes, of which one is blocked."""
    (folder / "reached").unlink(missing_ok=True)
    flags = ["--config=blocked.py", f"--workdir={folder / name}"]
    flags += [f"--coordinator_address={address}", "--num_processes=2"]
    flags += [f"--config.{key}={value}" for key, value in changes.items()]
    return [
        start(
            folder,
            name,
            *((where, how) if i == index else ("", "")),
            arguments=[*flags, f"--process_id={i}"],
        )
        for i in (0, 1)
    ]


def results_of(processes):
    """Exit codes and errors of all, and seconds until they ended."""
    begun = time.monotonic()
    try:
        results = [ended(x) for x in processes]
    finally:
        for process in processes:
            process.kill()
    return *zip(*results, strict=True), time.monotonic() - begun


def finish(folder, name, address, plain, read=digest, **changes):
    """Lets the run go on: it ends, bitwise, as one that nothing stopped."""
    codes, errors, _ = results_of(begin(folder, name, address, **changes))
    assert codes == (0, 0), errors
    assert (read(folder / name), numbers(folder / name)) == plain


@pytest.mark.parametrize("how", ["in Python", "in C"])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("where", ["data", "evaluation", "writer"])
def test_a_signal_is_obeyed_though_one_is_blocked(
    folder, address, free, plain, where, index, how
):
    """C16, C13: also where the other one gets it; after 20 s it would be forced."""
    if where == "writer" and index:
        pytest.skip("the first process alone writes")
    name = f"{where}{index}{how[3:]}"
    processes = begin(folder, name, address, index, where, how)
    reach(folder, processes[index])
    time.sleep(1)
    number = signal.SIGINT if how == "in C" else signal.SIGTERM
    processes[(index + (where == "data")) % 2].send_signal(number)
    codes, errors, seconds = results_of(processes)
    step = 25 if where == "data" else 20
    said = f"{number.name} received in process"
    assert set(codes) == {130 if how == "in C" else 75}, (codes, errors)
    assert all(f"step {step} is saved, and the same" in x for x in errors), errors
    assert all(said in x and "Traceback" not in x for x in errors), errors
    print(name, number.name, f"{seconds:.1f} s")
    finish(folder, name, free(), plain)


def steps_of(folder, name):
    return sorted(int(x.name) for x in (folder / name / "checkpoints").iterdir())


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("where", ["data", "evaluation"])
def test_an_error_of_one_is_raised_once_the_state_is_saved(
    folder, address, free, plain, where, index
):
    """The other one may have begun the next step, which never ends."""
    name = f"{where}-raises{index}"
    codes, errors, _ = results_of(begin(folder, name, address, index, where, "raises"))
    assert (codes[index], codes[1 - index]) == (1, 69), errors
    assert "OSError: the disk is gone" in errors[index]
    assert "ended at" in errors[1 - index] and "the disk is gone" in errors[1 - index]
    assert steps_of(folder, name)[-1] == (25 if where == "data" else 20)
    finish(folder, name, free(), plain)


@pytest.fixture(scope="module")
def sharded(folder, free):
    """What a run of two leaves whose state is sharded over them."""
    codes, errors, _ = results_of(begin(folder, "sharded", free(), **ALL))
    assert codes == (0, 0), errors
    return shares_of(folder / "sharded"), numbers(folder / "sharded")


def shares_of(workdir):
    """Digest of the last checkpoint, whose arrays span processes."""
    return bits(saved(workdir, steps_of(workdir.parent, workdir.name)[-1]))


@pytest.mark.parametrize(
    ("where", "index", "how"),
    [
        ("data", 0, "in C"),
        ("data", 1, "in Python"),
        ("data", 1, "raises"),
        ("evaluation", 0, "raises"),
        ("evaluation", 1, "in C"),
        ("writer", 0, "in Python"),
    ],
)
def test_both_save_their_shares_of_a_state_that_is_sharded_over_them(
    folder, address, free, sharded, where, index, how
):
    """None has given its share to the next step, which the other cannot begin."""
    name = f"sharded-{where}-{index}-{how[3:]}"
    processes = begin(folder, name, address, index, where, how, **ALL)
    if how == "raises":
        codes, errors, _ = results_of(processes)
        assert (codes[index], codes[1 - index]) == (1, 69), errors
        assert "OSError: the disk is gone" in errors[index]
    else:
        reach(folder, processes[index])
        time.sleep(1)
        processes[1 - index].terminate()
        codes, errors, seconds = results_of(processes)
        print(name, f"{seconds:.1f} s")
        assert codes == (75, 75), errors
        assert all("is saved, and the same command" in x for x in errors), errors
    step = 25 if where == "data" else 20
    assert steps_of(folder, name)[-1] == step
    shares = folder / name / f"checkpoints/{step}/state"
    assert len([*shares.glob("ocdbt.process_*")]) == 2
    finish(folder, name, free(), sharded, shares_of, **ALL)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_shares_of_a_process_that_cannot_answer_are_lost_and_it_is_said(
    folder, address, free, sharded, number
):
    """Of a dead one, or a stopped one: the run goes on from the last checkpoint."""
    name = f"sharded-{number.name}"
    processes = begin(folder, name, address, 1, "data", "in Python", **ALL)
    reach(folder, processes[1])
    time.sleep(1)
    processes[1].send_signal(number)
    if number == signal.SIGSTOP:
        processes[0].terminate()
    code, words = ended(processes[0])
    processes[1].kill()
    ended(processes[1])
    said = {signal.SIGSTOP: (75, "1 of the processes"), signal.SIGKILL: (69, "killed")}
    assert code == said[number][0] and said[number][1] in words, words
    assert steps_of(folder, name)[-1] == 20
    finish(folder, name, free(), sharded, shares_of, **ALL)
