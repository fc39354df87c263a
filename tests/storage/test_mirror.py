"""A second disk with copies of the checkpoints: `config.mirror`."""

import errno
import os
import shutil
from types import SimpleNamespace

import pytest

from configs import digits
from haiku_template.errors import ConfigError, StorageError
from haiku_template.runs import start, train
from haiku_template.runs.comparison import summarize_runs
from haiku_template.runs.rewind import go_back
from haiku_template.storage import mirror as mirrors
from haiku_template.storage import workdir as workdirs
from haiku_template.storage.checkpoint import Checkpoints
from haiku_template.storage.workdir import left_out, run_id, saved_steps
from tests.storage.test_verified import bits, flip_payload, lines, made


def run(path, num_steps=4, **options):
    options = {"log_every": 1, "save_every": 2, "mirror": path.parent / "m"} | options
    return bits(train(made(), num_steps=num_steps, workdir=path, **options).state)


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    """A run of four steps beside its mirror, and what it is after step 6."""
    folder = tmp_path_factory.mktemp("mirrored")
    run(folder / "a/run")
    shutil.copytree(folder / "a", folder / "on")
    return folder / "a", (run(folder / "on/run", 6), lines(folder / "on/run"))


@pytest.fixture
def copy(tmp_path, mirrored):
    """The workdir of a copy of the run, and what it is to end as."""
    shutil.copytree(mirrored[0], tmp_path / "a")
    return tmp_path / "a/run", mirrored[1]


def steps(folder):
    return saved_steps(folder / "checkpoints")


def test_the_mirror_has_what_the_workdir_has(copy):
    workdir, (expected, _) = copy
    mirror = workdir.parent / "m"
    assert steps(mirror) == steps(workdir) == [2, 4]
    with Checkpoints(mirror / "checkpoints", run=run_id(workdir)) as checkpoints:
        assert all(checkpoints.verify(step) for step in checkpoints.steps)
    assert run(workdir, 6) == expected
    assert steps(mirror) == steps(workdir) == [4, 6]
    assert sorted(os.listdir(mirror / "checkpoints")) == ["4", "6"]


def test_a_workdir_that_is_gone_is_brought_back(copy, caplog):
    workdir, (expected, _) = copy
    shutil.rmtree(workdir)
    assert run(workdir, 6) == expected
    assert "has no checkpoints: those of steps [2, 4] are copied there" in caplog.text
    shutil.rmtree(workdir / "checkpoints")
    assert run(workdir, 8) == run(workdir.with_name("b"), 8, mirror=None)


def test_the_mirror_itself_is_a_workdir(copy):
    workdir, (expected, _) = copy
    assert run(workdir.with_name("m"), 6, mirror=None) == expected


def test_a_mirror_is_compared_where_its_run_is_not(copy):
    workdir, _ = copy
    (workdir.parent / "latest").symlink_to(workdir)
    names = [run.name for run in summarize_runs(workdir.parent)]
    assert names == ["run"]
    (workdir.parent / "latest").unlink()
    shutil.copytree(workdir, workdir.parent / "branch")  # Which may go its own way.
    names = [run.name for run in summarize_runs(workdir.parent)]
    assert sorted(names) == ["branch", "run"]
    workdir.rename(workdir.parents[1] / "elsewhere")
    workdir.symlink_to(workdir.parents[1] / "elsewhere")
    names = [run.name for run in summarize_runs(workdir.parent)]
    assert sorted(names) == ["branch", "run"]
    (workdir.parent / "branch/run.json").write_text("{")
    names = [run.name for run in summarize_runs(workdir.parent)]
    assert sorted(names) == ["branch", "run"]
    workdir.unlink()
    shutil.rmtree(workdir.parent / "branch")
    assert [run.name for run in summarize_runs(workdir.parent)] == ["m"]


@pytest.mark.parametrize("damaged", [["4"], ["2", "4"]])
def test_a_damaged_step_is_read_from_the_mirror(copy, caplog, damaged):
    workdir, (expected, losses) = copy
    for step in damaged:
        flip_payload(workdir / "checkpoints" / step)
    assert run(workdir, 6) == expected and lines(workdir) == losses
    assert "4.damaged now, and the run goes on from step 4" in caplog.text
    assert f"is that of {workdir.with_name('m')}/checkpoints, and copied" in caplog.text
    assert steps(workdir) == [4, 6]


def test_a_newer_step_of_the_mirror_is_used(copy):
    workdir, (expected, _) = copy
    shutil.rmtree(workdir / "checkpoints/4")
    assert run(workdir, 6) == expected
    assert steps(workdir) == [4, 6] == steps(workdir.with_name("m"))


def test_a_run_that_had_ended_has_its_damaged_step_again(copy, caplog):
    workdir, _ = copy
    flip_payload(workdir / "checkpoints/4")
    run(workdir)
    assert steps(workdir) == [2, 4]
    with Checkpoints(workdir / "checkpoints", run=run_id(workdir)) as checkpoints:
        assert checkpoints.verify(4) and checkpoints.latest == 4
    caplog.clear()
    run(workdir)
    assert "damaged" not in caplog.text


def test_a_mirror_that_is_brought_back_by_halves_is_brought_back(copy, monkeypatch):
    """What a killed copy left is no run, by which the mirror would lose the rest."""
    workdir, (expected, _) = copy
    mirror, copied = workdir.with_name("m"), mirrors._copy_step
    shutil.rmtree(workdir)

    def killed(source, target):
        if source.name == "4":
            raise KeyboardInterrupt
        copied(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(mirrors, "_copy_step", killed)
        mirrors.bring_back(workdir, mirror)
    assert steps(workdir) == []
    with pytest.raises(ConfigError, match="saved checkpoints, .* now there is none"):
        run(workdir, 6, mirror=None)
    assert run(workdir, 6) == expected
    assert steps(workdir) == [4, 6]
    assert not [*workdir.glob("*copied*")]


def test_a_config_s_run_is_brought_back(tmp_path, one_device):
    """Whatever of it is lost; its config is checked once it is back."""
    config, workdir = digits.get_config(), tmp_path / "run"
    keys = {"num_steps": 4, "save_every": 2, "mirror": str(tmp_path / "m")}
    config.update(keys | {"eval_every": None})
    for num_steps, lost in ((4, None), (6, "checkpoints"), (8, ".")):
        config.num_steps = num_steps
        if lost:
            shutil.rmtree(workdir / lost)
        start.run(config, one_device, str(workdir))
        assert steps(workdir)[-1] == num_steps
    assert steps(workdir)[0] > 2  # It went on, and did not begin anew.
    shutil.rmtree(workdir / "checkpoints")
    start.run(config, one_device, str(workdir), rewind="7")
    assert steps(workdir)[-1] == 8 and [*workdir.glob("*.before")] == []
    shutil.rmtree(workdir / "checkpoints")
    config.batch_size = 7
    with pytest.raises(ConfigError, match="another config, and nothing was changed"):
        start.run(config, one_device, str(workdir))
    assert steps(workdir) == []
    # What a new run would refuse gets no copies.
    (workdir / "config.json").unlink()
    with pytest.raises(ConfigError, match="not known what made them"):
        start.run(config, one_device, str(workdir))
    shutil.rmtree(workdir)
    workdir.mkdir()
    (workdir / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="model.safetensors, which was exported"):
        start.run(config, one_device, str(workdir))
    assert [x.name for x in workdir.iterdir()] == ["model.safetensors"]


def test_an_empty_mirror_is_none(tmp_path, monkeypatch):
    """Not the current directory, as of a variable of a shell that is not set."""
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "run", mirror="")
    assert [x.name for x in tmp_path.iterdir()] == ["run"]


def test_damage_on_both_ends_the_run_and_moves_nothing(copy):
    workdir, _ = copy
    folders = [workdir / "checkpoints", workdir.with_name("m") / "checkpoints"]
    for folder in folders:
        for step in "24":
            flip_payload(folder / step)
    with pytest.raises(StorageError, match=r"none .* \[2, 4\] is whole") as caught:
        run(workdir, 6)
    assert caught.value.exit_code == 74
    assert all(str(caught.value).count(f"in {folder} is") == 2 for folder in folders)
    assert [sorted(os.listdir(folder)) for folder in folders] == [["2", "4"]] * 2


def test_a_mirror_that_fails_is_a_warning(copy, caplog, monkeypatch):
    workdir, (expected, losses) = copy

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", fail)
        assert run(workdir, 6) == expected and lines(workdir) == losses
    assert "are not copied to" in caplog.text and "No space left" in caplog.text
    assert steps(workdir.with_name("m")) == [2, 4]  # Nothing is removed.
    run(workdir, 8)
    assert steps(workdir.with_name("m")) == [6, 8]


def test_a_mirror_that_cannot_be_used_at_all_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    run(tmp_path / "run", mirror=tmp_path / "file/mirror")
    assert "goes on without a mirror to read" in caplog.text
    assert "are not copied to" in caplog.text
    assert steps(tmp_path / "run") == [2, 4]


def test_a_mirror_that_cannot_be_read_is_a_warning(copy, caplog):
    workdir, (expected, _) = copy
    (workdir.with_name("m") / "run.json").write_text("[")
    assert run(workdir, 6) == expected
    assert "whose mirror it is cannot be told" in caplog.text
    assert steps(workdir.with_name("m")) == [4, 6]


def test_a_step_is_not_held_up_by_a_slow_mirror(copy, monkeypatch):
    """Its copies are those of the newest saves, and not of each."""
    workdir, _ = copy
    copies, copytree = [], shutil.copytree

    def wait(source, target):
        copies.append(source.name)
        while len(copies) == 1 and steps(workdir)[-1] < 10:
            pass
        return copytree(source, target)

    monkeypatch.setattr(mirrors, "shutil", SimpleNamespace(copytree=wait))
    run(workdir, 12)
    assert copies[0] == "6" and copies[1] in ("10", "12")
    assert steps(workdir.with_name("m")) == [10, 12]


def test_the_mirror_of_another_run_and_the_workdir_itself_are_refused(copy):
    workdir, _ = copy
    run(workdir.with_name("b"), mirror=None)
    with pytest.raises(ConfigError, match="checkpoints of another run"):
        run(workdir.with_name("b"), 6)
    with pytest.raises(ConfigError, match="is --workdir"):
        run(workdir, 6, mirror=workdir)


def test_what_a_run_s_processes_write_is_no_run_and_runs_may_be_called_so(copy):
    workdir, _ = copy
    shutil.copytree(workdir, workdir.parent / "processes" / "a")
    shutil.copytree(workdir, workdir / "processes" / "1")
    names = [run.name for run in summarize_runs(workdir.parent)]
    assert sorted(names) == ["processes/a", "run"]


def test_a_step_that_the_run_went_back_from_is_not_read_from_the_mirror(copy):
    workdir, (expected, _) = copy
    folder = workdir / "checkpoints"
    (folder / "4").rename(folder / "4.rewound")
    with Checkpoints(folder, run=run_id(workdir)):
        mirror = mirrors.Mirror(workdir, workdir.with_name("m"), run_id(workdir))
        assert mirror.checkpoints.steps == [2]
    assert run(workdir, 6) == expected
    assert steps(workdir.with_name("m")) == [4, 6]


def test_a_step_that_is_saved_anew_after_a_rewind_is_read_from_the_mirror(copy):
    workdir, _ = copy
    go_back(workdir, "3")
    run(workdir, 6)  # Without step 3: its 4 is another.
    with Checkpoints(workdir / "checkpoints", run=run_id(workdir)):
        mirror = mirrors.Mirror(workdir, workdir.with_name("m"), run_id(workdir))
        assert mirror.checkpoints.steps == [4, 6]


@pytest.mark.parametrize("lost", ["2", "4"])
def test_steps_that_a_mirror_alone_has_are_left_out_too(copy, tmp_path, lost):
    workdir, _ = copy
    mirror = workdir.with_name("m")
    shutil.copytree(workdir.parent, tmp_path / "whole")
    go_back(tmp_path / "whole/run", "3", tmp_path / "whole/m")
    expected = run(tmp_path / "whole/run", 6)
    shutil.rmtree(workdir / "checkpoints" / lost)
    go_back(workdir, "3", mirror)
    assert steps(workdir) == [2]
    assert run(workdir, 6) == expected
    assert steps(mirror) == [4, 6]


def test_a_rewind_that_was_broken_off_is_made_again(copy, tmp_path, monkeypatch):
    workdir, _ = copy
    mirror = workdir.with_name("m")
    shutil.copytree(workdir.parent, tmp_path / "whole")
    go_back(tmp_path / "whole/run", "3")
    expected = run(tmp_path / "whole/run", 6)
    shutil.rmtree(workdir / "checkpoints/4")
    writes, left = workdirs.write_atomically, []

    def fail(path, contents):
        left.append(path)
        if len(left) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        writes(path, contents)

    monkeypatch.setattr(workdirs, "write_atomically", fail)
    with pytest.raises(ConfigError, match="No space left"):
        go_back(workdir, "3", mirror)
    assert not left_out(workdir)
    go_back(workdir, "3", mirror)
    assert left[0].name == "manifest" and run(workdir, 6) == expected


def test_a_copy_that_is_damaged_is_left_out_and_an_older_one_is_brought(copy):
    workdir, _ = copy
    mirror = workdir.with_name("m")
    shutil.copytree(mirror / "checkpoints/2", mirror / "checkpoints/1")
    for step in (2, 4):
        for file in (mirror / f"checkpoints/{step}/state").rglob("*"):
            if file.is_file() and file.stat().st_size > 1000:
                file.write_bytes(b"")
        shutil.rmtree(workdir / f"checkpoints/{step}")
    (workdir / "checkpoints/6").mkdir()
    shutil.copytree(
        mirror / "checkpoints/4", workdir / "checkpoints/6", dirs_exist_ok=True
    )
    go_back(workdir, "3", mirror)
    assert steps(workdir) == [1]
    names = {x.name for x in (workdir / "checkpoints").iterdir()}
    assert names == {"1", "4.rewound", "6.rewound"}


@pytest.mark.parametrize("kind", ["link", "fifo", "error"])
def test_a_copy_that_cannot_be_read_is_left_out_too(copy, caplog, monkeypatch, kind):
    """And what cannot be written is an error, of the workdir."""
    workdir, _ = copy
    mirror, copyfile = workdir.with_name("m"), shutil.copyfile
    files = [x for x in (mirror / "checkpoints/4/state").rglob("*") if x.is_file()]
    file = max(files, key=lambda x: x.stat().st_size)

    def fail(source, target, **options):
        if kind == "error" and str(file) == os.fspath(source):
            raise OSError(errno.EIO, "Input/output error", str(source))
        return copyfile(source, target, **options)

    monkeypatch.setattr(shutil, "copyfile", fail)
    if kind != "error":
        file.unlink()
        file.symlink_to("/nowhere") if kind == "link" else os.mkfifo(file)
    shutil.rmtree(workdir)
    mirrors.bring_back(workdir, mirror)
    assert steps(workdir) == [2] and f"step 4 in {mirror} is damaged" in caplog.text


def test_an_older_step_that_is_damaged_keeps_nothing_else_from_the_mirror(copy, caplog):
    workdir, _ = copy
    mirror = workdir.with_name("new")
    shutil.copytree(workdir / "checkpoints/2", mirror / "checkpoints/1")
    shutil.copy(workdir / "run.json", mirror)
    for file in (workdir / "checkpoints/2/state").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(b"")
    mirrors.copy_run(workdir, mirror)
    assert steps(mirror) == [4] and lines(mirror) == lines(workdir)
    assert f"step 2 in {workdir} is damaged" in caplog.text


def test_an_update_as_the_last_copy_ends_is_not_lost(copy, monkeypatch):
    workdir, _ = copy
    mirror = mirrors.Mirror(workdir, workdir.with_name("m"), run_id(workdir))
    copies = []
    monkeypatch.setattr(mirrors, "copy_run", lambda *folders: copies.append(folders))
    mirror.update()
    mirror._thread.join()
    monkeypatch.setattr(mirror._thread, "is_alive", lambda: len(copies) == 1)
    mirror.update()  # Of a thread that has looked for the last time.
    monkeypatch.setattr(mirror._thread, "is_alive", lambda: False)
    mirror.close()
    assert len(copies) == 2


def test_a_workdir_without_room_is_no_damage_of_its_mirror(copy, monkeypatch):
    workdir, _ = copy

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", fail)
    shutil.rmtree(workdir)
    with pytest.raises(ConfigError, match="cannot be written to: .*No space left"):
        mirrors.bring_back(workdir, workdir.with_name("m"))


def test_a_rewind_names_a_mirror_that_cannot_be_read(copy, monkeypatch):
    workdir, _ = copy
    mirror = workdir.with_name("m")

    def fail(step):
        raise PermissionError(errno.EACCES, "Permission denied", str(step))

    monkeypatch.setattr(mirrors, "_manifest", fail)
    (workdir / "checkpoints/4.rewound").mkdir()
    with pytest.raises(ConfigError, match="config.mirror=.* cannot be read, and may"):
        go_back(workdir, "3", mirror)
    assert steps(workdir) == [2, 4] and not left_out(workdir)


def test_steps_of_a_mirror_are_compared_with_those_that_were_left_alone(
    tmp_path, monkeypatch
):
    reads, real = [], mirrors._manifest
    folder, workdir = tmp_path / "mirror", tmp_path / "run"
    for step in range(1, 31):
        (folder / workdirs.CHECKPOINTS / str(step)).mkdir(parents=True)
        (folder / workdirs.CHECKPOINTS / str(step) / workdirs.COMMIT).touch()
    away = workdir / workdirs.CHECKPOINTS / "7.rewound"
    for place in (away, folder / workdirs.CHECKPOINTS / "7"):
        (place / "manifest").mkdir(parents=True)
        (place / "manifest" / "manifest").write_text("{}")
    monkeypatch.setattr(mirrors, "_manifest", lambda x: reads.append(x) or real(x))
    copies = mirrors._Copies(workdir, folder, "run")
    assert copies.steps == [step for step in range(1, 31) if step != 7]
    copies.close()
    assert len(reads) == 2


def test_a_mirror_whose_path_would_be_another_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has a backslash"):
        run(tmp_path / "run", mirror=tmp_path / "m\\b")


def test_lines_of_metrics_come_back_by_which_early_stopping_goes(copy):
    workdir, (_, expected) = copy
    shutil.rmtree(workdir)
    run(workdir, 6)
    assert lines(workdir) == expected


def test_a_mirror_that_is_new_beside_a_run_that_is_done_is_filled(copy):
    workdir, _ = copy
    run(workdir, mirror=workdir.with_name("new"))
    assert steps(workdir.with_name("new")) == steps(workdir)


def test_a_folder_with_another_s_config_is_no_mirror(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="m holds a config.json that is no run's"):
        run(tmp_path / "run")
    assert (tmp_path / "m/config.json").read_text() == '{"model_type": "gpt2"}'


def test_two_runs_with_one_mirror_do_not_remove_each_other_s_copies(copy, tmp_path):
    workdir, _ = copy
    run(workdir.with_name("b"), mirror=None)
    with pytest.raises(ConfigError, match="holds the checkpoints of another run than"):
        mirrors.copy_run(workdir.with_name("b"), workdir.with_name("m"))
    assert steps(workdir.with_name("m")) == [2, 4]


def test_a_copy_that_is_newer_than_all_of_the_workdir_stays(copy):
    """It may be the only one that is whole."""
    workdir, _ = copy
    shutil.rmtree(workdir / "checkpoints/4")
    mirrors.copy_run(workdir, workdir.with_name("m"))
    assert steps(workdir.with_name("m")) == [2, 4]
