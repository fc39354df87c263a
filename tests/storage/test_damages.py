"""Every kind of damage to the newest checkpoint, at every file: rows C07 and C08.

Each is without effect, or the run goes on from the step before, in a sentence.
"""

import contextlib
import functools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from haiku_template.devices import Layout
from haiku_template.storage import checkpoint
from haiku_template.storage.checkpoint import Checkpoints, newest_whole
from tests.runs import run_command
from tests.storage.test_verified import bits, flip, flip_payload
from tests.test_commands import digest

STEPS = (1, 2, 4)  # The newest is damaged; a swap with the one before damages both.
METRICS = {"eval/loss": 0.5, "eval/accuracy": 0.25}
SMALL = 1000  # Bytes of a file that has ten bits of its own flipped.


def state_of(run, step):
    rng = np.random.default_rng([ord(run), step])
    return {
        "params": {
            "w": rng.normal(size=(8, 40)).astype(np.float32),
            "b": rng.normal(size=4).astype(np.float32),
        },
        "opt_state": ({"mu": rng.normal(size=(8, 40)).astype(np.float32)},),
        "step": np.array(step, np.int32),
    }


def save_runs(folder, place):
    """Two runs with three steps; `place` puts a state on devices."""
    for run in "ab":
        with Checkpoints(folder / run, run=run, keep_last=3) as checkpoints:
            for step in STEPS:
                checkpoints.save(step, place(state_of(run, step)), METRICS)


def swap(a, b):
    away = a.with_name("away")
    a.rename(away)
    b.rename(a)
    away.rename(b)


def replaced_by(link, file, target):
    file.unlink() if file.is_file() else shutil.rmtree(file)
    link(target, file)


def moved_behind_a_link(file):
    away = file.with_name("away")
    file.rename(away)
    file.symlink_to(away)


def counterpart(file, step, other):
    """File of another step in the same place; random names count by their order."""
    path = file.relative_to(step)
    names = [sorted(x.name for x in (s / path).parent.iterdir()) for s in (step, other)]
    index = min(names[0].index(file.name), len(names[1]) - 1)
    return other / path.parent / names[1][index]


def damages_of(file, step, others):
    """Damages of a file or folder of a step, but for its bits: names and functions."""
    name = file.relative_to(step)
    if file.is_file():
        for size in sorted({0, file.stat().st_size // 2, file.stat().st_size - 1}):
            yield f"{name} cut to {size}", lambda n=size: os.truncate(file, max(n, 0))
        yield f"{name} removed", file.unlink
        data = file.read_bytes()
        yield f"{name} longer", lambda: file.write_bytes(data + b"0") and None
    else:
        yield f"{name} removed", lambda: shutil.rmtree(file)
        yield f"{name} emptied", lambda: (shutil.rmtree(file), file.mkdir())
    yield f"{name} renamed", lambda: file.rename(file.with_name("another"))
    yield f"{name} moved behind a link", lambda: moved_behind_a_link(file)
    nowhere = functools.partial(replaced_by, lambda to, at: at.symlink_to(to), file)
    yield f"{name} a link to nowhere", lambda: nowhere("nowhere")
    yield f"{name} a link to itself", lambda: nowhere(file.name)
    for whose, other in others.items():
        twin = counterpart(file, step, other)
        yield f"{name} swapped with {whose}", lambda t=twin: swap(file, t)
        yield f"{name} a link to {whose}", lambda t=twin: nowhere(t)
        if file.is_file() and twin.is_file():
            hard = functools.partial(replaced_by, os.link, file)
            yield f"{name} a hard link to {whose}", lambda h=hard, t=twin: h(t)


def table(folder, num_bits, num_small):
    """All damages of step 4 of run `a`: names, and functions that do it."""
    rng, step = np.random.default_rng(0), folder / "a/4"
    others = {"step 2": folder / "a/2", "run b": folder / "b/4"}
    paths = sorted(step.rglob("*"))
    files = [path for path in paths if path.is_file()]
    sizes = np.array([path.stat().st_size for path in files])
    # By place: random names differ each time.
    draws = rng.choice(len(files), num_bits, p=sizes / sizes.sum()).tolist()
    draws += [i for i, size in enumerate(sizes) if size < SMALL] * num_small
    for i in draws:
        bit = int(rng.integers(8 * sizes[i]))
        name = f"{files[i].relative_to(step)} bit {bit}"
        yield name, functools.partial(flip, files[i], bit)
    for path in paths:
        yield from damages_of(path, step, others)
    yield "step swapped with step 2", lambda: swap(step, folder / "a/2")
    yield "step of run b", lambda: swap(step, folder / "b/4")
    to = functools.partial(replaced_by, lambda to, at: at.symlink_to(to), step)
    yield "step a link to run b", lambda: to(folder / "b/4")
    yield "step a link to step 2", lambda: to(folder / "a/2")
    yield "step a link to nowhere", lambda: to(folder / "nowhere")
    yield "step a file", lambda: (shutil.rmtree(step), step.write_text("4"))
    yield "step removed", lambda: shutil.rmtree(step)


def damage(folder, num_bits, num_small, number):
    """Does a row of the table; its name."""
    name, change = [*table(folder, num_bits, num_small)][number]
    with contextlib.suppress(NotADirectoryError):
        change()
    return name


def outcome(folder, expected, abstract):
    """Step that a run goes on from, after its bits and metrics were compared."""
    with Checkpoints(folder / "a", run="a", cleanup=True) as checkpoints:
        steps = checkpoints.steps
        (step, _), state, damages = newest_whole(
            [(step, 0) for step in steps],
            lambda copy: checkpoints.restore(copy[0], abstract),
        )
        metrics = checkpoints.metrics
        assert all("\n" not in x for x in damages.values())
    assert bits(state) == expected[step]
    # A bit may make another metric of the checksum.
    assert all(not x or METRICS.items() <= x.items() for x in metrics.values())
    return step


def tried(tmp_path, place, abstract, num_bits, num_small, every=1):
    """Counts of damages by the step that the run went on from."""
    whole, folder = tmp_path / "whole", tmp_path / "copy"
    save_runs(whole, place)
    expected = {step: bits(state_of("a", step)) for step in STEPS}
    counts, wrong = dict.fromkeys(STEPS, 0), []
    shutil.copytree(whole, folder)
    total = len([*table(folder, num_bits, num_small)])
    for number in range(0, total, every):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        name = damage(folder, num_bits, num_small, number)
        try:
            counts[outcome(folder, expected, abstract)] += 1
        except Exception as error:
            wrong.append((name, repr(error)[:300]))
    print(f"{counts}: steps that the run went on from; {len(wrong)} wrong")
    assert not wrong, wrong
    return counts


def on_host(state):
    return state


def sharded(four_devices):
    """Places a state on four devices, sharded; and its shapes there."""
    layout = Layout(four_devices.devices, (("*", "data"),))

    def place(state):
        return four_devices.init(lambda: state, layout=layout)

    shapes = four_devices.abstract(lambda: state_of("a", 2), layout=layout)
    assert not place(state_of("a", 2))["params"]["w"].is_fully_replicated
    return place, shapes


def test_some_of_each_kind_of_damage(tmp_path, monkeypatch):
    """Each 23rd of the table below."""
    monkeypatch.setattr(checkpoint, "READS", 1)
    counts = tried(tmp_path, on_host, state_of("a", 2), 60, 2, every=23)
    assert counts[2] > 5 and counts[4] > 0


def layout_and_every(layout, every, *marks):
    return pytest.param(layout, every, id=f"{layout}-{every}", marks=marks)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "layout, every",
    [
        layout_and_every("replicated", 3, pytest.mark.slow),
        layout_and_every("sharded", 6, pytest.mark.slow),
        layout_and_every("replicated", 1, pytest.mark.long),
        layout_and_every("sharded", 1, pytest.mark.long),
    ],
)
def test_no_damage_is_restored_wrong_and_all_fall_back(
    tmp_path, request, layout, every
):
    """C07, C08: 200 bits by size, 10 in each small file, and all other damages."""
    place, shapes = on_host, state_of("a", 2)
    if layout == "sharded":
        place, shapes = sharded(request.getfixturevalue("four_devices"))
    counts = tried(tmp_path, place, shapes, 200, 10, every)
    assert counts[2] > 300 / every


SHORT = ["--config=configs/digits.py", "--config.save_every=5", "--config.keep_last=3"]
SHORT += ["--config.num_steps=20", "--config.log_every=10", "--config.eval_every=None"]


def command(workdir):
    done = run_command("train", *SHORT, f"--workdir={workdir}")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.mark.slow
def test_the_command_goes_on_after_damages(tmp_path):
    command(tmp_path / "run")
    expected = digest(tmp_path / "run")
    for number, damage in enumerate(
        (
            flip_payload,
            lambda step: swap(step, step.with_name("15")),
            lambda step: shutil.rmtree(step / "manifest"),
        )
    ):
        workdir = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", workdir)
        damage(workdir / "checkpoints/20")
        errors = command(workdir)
        assert "20.damaged now" in errors, (number, errors)
        for away in workdir.glob("checkpoints/*.damaged"):
            shutil.rmtree(away)
        assert digest(workdir) == expected


class Disk:
    """What of a folder a power cut leaves: what was synced, and in synced folders."""

    def __init__(self, monkeypatch, folder, when_synced):
        self.files, self.folders, self.when_synced = {}, {}, when_synced
        self._folder, self._fsync = folder, os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, file):
        self._fsync(file)
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.is_relative_to(self._folder):
            stat = path.stat()
            if path.is_dir():
                self.folders[stat.st_ino] = {x.stat().st_ino for x in path.iterdir()}
            else:
                self.files[stat.st_ino] = stat.st_size, stat.st_mtime_ns
            self.when_synced()

    def cut(self, target):
        """Copies what is left: files that were not synced are empty."""
        target.mkdir()
        self._copy(self._folder, target)

    def _copy(self, source, target):
        names = self.folders.get(source.stat().st_ino, set())
        for path in source.iterdir():
            stat = path.stat()
            if stat.st_ino not in names:
                continue  # Its name is not on the disk.
            copy = target / path.name
            if path.is_dir():
                copy.mkdir()
                self._copy(path, copy)
            elif self.files.get(stat.st_ino) == (stat.st_size, stat.st_mtime_ns):
                shutil.copy(path, copy)
            else:
                copy.touch()


@pytest.mark.slow(but="replicated")
@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_a_power_cut_loses_at_most_the_newest_step(
    tmp_path, monkeypatch, request, layout
):
    """At each moment between two operations of Python's, with one step kept."""
    folder, images = tmp_path / "run", []
    place, shapes = on_host, state_of("a", 1)
    if layout == "sharded":
        place, shapes = sharded(request.getfixturevalue("four_devices"))

    def cut():
        images.append((tmp_path / str(len(images)), current[0] - 1))
        disk.cut(images[-1][0])

    current = [0]
    disk = Disk(monkeypatch, folder, cut)
    remove = checkpoint.remove

    def remove_and_cut(path):
        cut()
        remove(path)
        cut()

    monkeypatch.setattr(checkpoint, "remove", remove_and_cut)
    with Checkpoints(folder, run="a", keep_last=1) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.wait()
            current[0] = step
            checkpoints.save(step, place(state_of("a", step)), METRICS)
    assert len(images) > 30
    monkeypatch.undo()
    lost = 0
    for image, durable in images:
        with Checkpoints(image, run="a") as checkpoints:
            if durable == 0 and not checkpoints.steps:
                continue
            (step, _), state, _ = newest_whole(
                [(step, 0) for step in checkpoints.steps],
                lambda copy, c=checkpoints: c.restore(copy[0], shapes),
            )
            assert bits(state) == bits(state_of("a", step)) and step >= durable, image
            lost += step == durable
        shutil.rmtree(image)
    assert lost > 0  # Of those that were cut before the newest was on the disk.
