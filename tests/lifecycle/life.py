"""One life of a run: what befalls it, and what must be true in the end."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.lifecycle.compare import compared, files_of
from tests.runs import ROOT, UNDRAWN

# Undisturbed, each takes some seconds, and saves often: events fall anywhere.
EVERY = {"num_steps": 600, "log_every": 25, "eval_every": 100, "save_every": 25}
CONFIGS = {
    "mlp": ("digits", 1, {}),
    "zero1": ("digits", 4, {"optimizer.shard_moments": True, "ema_decay": 0.9}),
    "sharded": ("digits", 4, {"sharding": '(("*","data"),)', "accumulate_steps": 2}),
    "float16": ("digits", 1, {"precision": "float16", "optimizer.name": "sgd"}),
    "dropout": ("digits", 2, {"model.dropout": 0.2, "steps_per_call": 7}),
    "staged": ("digits", 1, {"data.placement": "device", "steps_per_call": 50}),
    "replayed": ("digits", 2, {"sdc_replay": "first:3,every:100"}),
    "patient": ("digits", 1, {"early_stop.patience": 1, "early_stop.min_delta": 0.03}),
    "exact": ("digits", 2, {"exact_elastic": 2, "precision": "bfloat16"}),
    "short": ("digits", 1, {"max_minutes": 0.15, "steps_per_call": 5}),
    "timed": ("digits", 1, {"save_minutes": 0.005, "save_every": None}),
    "epochs": ("digits", 1, {"num_epochs": 53.5, "save_every": 40}),
    "grown": ("digits", 1, {"optimizer.schedule": "constant", "steps_per_call": 5}),
    "elastic": ("digits", 4, {"exact_elastic": 4, "model.dropout": 0.1}),
    "rewound": ("digits", 2, {"keep_last": 100, "steps_per_call": 10}),
    "workers": ("digits", 1, {"data.workers": 2, "steps_per_call": 4}),
    "adapters": ("digits", 2, {"init_from": "{mlp}", "finetuning.lora.rank": 2}),
    "gpt": (
        "gpt_bytes",
        2,
        {
            "data.path": ROOT / "docs",
            "data.context": 16,
            "data.eval_windows": 32,
            "model.num_layers": 1,
            "model.width": 32,
            "model.context": 16,
            "num_steps": 200,
        },
    ),
}
REWIND = "--rewind=110:114,240"
# What a start may change of them, since it is no mathematics.
LOOSE = {"save_every": (10, 25, 60, 300), "save_minutes": (0, 0.01)}
LOOSE |= {"keep_last": (1, 2, 4), "keep_best": (0, 1, 2), "max_failed_saves": (1, 3)}
BESIDE = {
    "checkpoints": (),
    "evaluate": ("--device=cpu",),
    "predict": ("--device=cpu", "--output={home}/predictions{count}.npz"),
    "export": ("--device=cpu", "--format=npz", "--output={home}/exported{count}.npz"),
}
WRITTEN_AGAIN = {"train.log", "goodput.jsonl", ".lock", "report.png"}
WRITTEN_AGAIN |= {"run.json", "env.json"}
ENDS = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGUSR1: 75, signal.SIGINT: 130}
SECONDS = 240  # In which any command must end.


class Life:
    """A run that is begun, disturbed, moved, damaged, and brought to its end.

    `faults` are sentences; `told` is what happened, in order.
    """

    def __init__(self, seed: int, folder: Path, name: str | None = None):
        self.random = random.Random(seed)
        self.name = name or self.random.choice(sorted(CONFIGS))
        self.faults, self.told, self.count = [], [], 0
        self.reference = folder / "undisturbed" / self.name
        self.home = folder / f"life-{seed}"
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        self.workdir = self.home / "run"
        self.mirror = self.home / "mirror" if self.random.random() < 0.5 else None

    def live(self):
        """Lets events happen, ends the run, and compares it."""
        self._make_reference()
        events = [self.interrupt] * 4 + [self.beside] * 2 + [self.twice, self.pause]
        events += [self.damage, self.move, self.lose, self.tear, self.narrow]
        events += [self.refused]
        for event in self.random.choices(events, k=self.random.randint(2, 6)):
            event()
        if self.name == "rewound":
            self._rewind()
        for _ in range(30):  # `max_minutes` ends it often.
            code, err = self._end(self._train())
            if code or self.name != "short" or "done" in self._log()[-200:]:
                break
        if code:
            self.faults.append(f"the last start ended with {code}: {err[-800:]}")
        else:
            self._compare()

    # Events.

    def interrupt(self):
        """Sends a signal, or two, or kills, at any time of a start."""
        process = self._train(loose=True)
        self._sleep(process, self.random.uniform(0.2, 9))
        number = self.random.choice([*ENDS, signal.SIGKILL, signal.SIGKILL])
        self._send(process, number)
        if number != signal.SIGKILL and self.random.random() < 0.3:
            self._sleep(process, self.random.uniform(0, 1))
            self._send(process, self.random.choice([number, signal.SIGKILL]))
        _, text = self._end(process, number)
        saved = re.search(r"step (\d+) is saved", text)
        if saved and int(saved[1]) not in self._steps():
            self.faults.append(f"{process.errors.name}: {saved[0]}, which is not")

    def beside(self):
        """Runs another command beside the run, which then goes on for a while."""
        process = self._train(loose=True)
        self._sleep(process, self.random.uniform(3, 8))
        name = self.random.choice(sorted(BESIDE))
        self._other(name)
        self._send(process, signal.SIGKILL)
        self._end(process, signal.SIGKILL)

    def twice(self):
        """Starts it again while it runs: the second must not touch it."""
        process = self._train()
        self._sleep(process, self.random.uniform(0, 6))
        second = self._train()
        codes = [self._end(one, also=(64, 74))[0] for one in (second, process)]
        if 0 not in codes:
            self.faults.append(f"{second.errors.name}: neither ran, but {codes}")

    def pause(self):
        """Stops the process for a while, as a suspended laptop."""
        process = self._train()
        self._sleep(process, self.random.uniform(1, 6))
        self._send(process, signal.SIGSTOP)
        time.sleep(self.random.uniform(0.1, 2))
        self._send(process, signal.SIGCONT)
        self._sleep(process, self.random.uniform(0, 2))
        self._send(process, signal.SIGTERM)
        self._end(process, signal.SIGTERM)

    def damage(self):
        """Changes, cuts or removes a file of the newest checkpoint, if another is."""
        steps = self._steps()
        if len(steps) < 2:
            return
        folder = self.workdir / "checkpoints" / str(max(steps))
        files = sorted(x for x in folder.rglob("*") if x.is_file() and x.stat().st_size)
        file = self.random.choice(files)
        how = self.random.choice(["flip", "cut", "remove", "empty"])
        content = bytearray(file.read_bytes())
        content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        changes = {"flip": content, "cut": content[: len(content) // 2], "empty": b""}
        file.unlink()
        if how != "remove":
            file.write_bytes(changes[how])
        self.told.append(f"{how} {file.relative_to(self.workdir)}")

    def move(self):
        """Moves the workdir to another place, or goes on in a copy."""
        if not self.workdir.exists():
            return
        place = self.home / f"run{len(self.told)}"
        if self.random.random() < 0.5:
            self.workdir.rename(place)
        else:
            shutil.copytree(self.workdir, place, symlinks=True)
        self.workdir = place
        self.told.append(f"on in {place.name}")

    def lose(self):
        """Loses the workdir, or its checkpoints, of which there is a mirror."""
        if self.mirror is None or not (self.mirror / "run.json").exists():
            return
        part = self.random.choice([self.workdir, self.workdir / "checkpoints"])
        shutil.rmtree(part, ignore_errors=True)
        self.told.append(f"lost {part.relative_to(self.home)}")

    def tear(self):
        """Leaves half a row at the end of a file, as a lost power does."""
        file = self.workdir / self.random.choice(["metrics.jsonl", "goodput.jsonl"])
        if not file.exists() or not (content := file.read_bytes()):
            return
        half = content.splitlines()[-1][: self.random.randint(1, 40)]
        file.write_bytes(content + half)
        self.told.append(f"tore {file.name}")

    def narrow(self):
        """Starts it with too few files, or files that are too small."""
        files = f"--nofile={self.random.randint(8, 64)}"
        size = f"--fsize={self.random.choice([0, 4096, 100_000, 400_000])}"
        limit = ["prlimit", self.random.choice([files, size])]
        process = self._train(limit=limit)
        self.told.append(f"  with {limit[1]}")
        self._end(process, also=(1, 64, 69, 70, 74, 75, 77), strict=False)

    def refused(self):
        """Starts it with other mathematics: it says so, and touches nothing."""
        if not self._steps():
            return
        before = {x: x.read_bytes() for x in files_of(self.workdir)}
        keys = ["seed=7", "batch_size=64", "optimizer.weight_decay=0.5", "nonsense=1"]
        process = self._train(more=[f"--config.{self.random.choice(keys)}"])
        code, _ = self._end(process, also=(64,))
        after = {x: x.read_bytes() for x in files_of(self.workdir)}
        if code != 64 or before != after:
            moved = [x for x in before.keys() | after if before.get(x) != after.get(x)]
            self.faults.append(f"{process.errors.name}: {code}; changed {moved}")

    def _rewind(self):
        """Leaves steps out of a run that is past them, or stopped as it does so."""
        self._end(self._train())
        process = self._train(more=[REWIND])
        if self.random.random() < 0.7:
            self._sleep(process, self.random.uniform(1, 8))
            self._send(process, self.random.choice([signal.SIGKILL, signal.SIGTERM]))
        self._end(process, signal.SIGKILL, also=(75, -15))
        self._end(self._train(more=[REWIND]), also=(64,))

    # Commands.

    def _flags(self, workdir, loose=False):
        config, devices, changes = CONFIGS[self.name]
        mlp = self.reference.parent / "mlp"
        changes = {k: str(x).replace("{mlp}", str(mlp)) for k, x in changes.items()}
        keys = EVERY | changes
        if self.name == "elastic" and workdir != self.reference:
            devices = self.random.choice([1, 2, 4])
        if self.name == "grown" and loose:
            keys["num_steps"] = self.random.choice([200, 310, 450])
        if loose:
            for key in self.random.sample(sorted(LOOSE), 2):
                if key not in changes and self.name != "patient":
                    keys[key] = self.random.choice(LOOSE[key])
        flags = [f"--config.{key}={value}" for key, value in keys.items()]
        return [
            f"--config={ROOT}/configs/{config}.py",
            f"--workdir={workdir}",
            "--device=cpu",
            *([f"--simulate_devices={devices}"] if devices > 1 else []),
            *flags,
        ]

    def _train(self, loose=False, limit=(), more=()):
        flags = [*self._flags(self.workdir, loose), *more]
        if self.mirror is not None:
            flags.append(f"--config.mirror={self.mirror}")
        self.told.append("train " + " ".join(flags[3:]))
        return self._start("train", *flags, limit=limit)

    def _start(self, name, *flags, limit=()):
        self.count += 1
        errors = self.home / f"{self.count}-{name}.txt"
        with errors.open("wb") as file:
            process = subprocess.Popen(
                [*limit, sys.executable, "-m", f"haiku_template.{name}", *flags],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": UNDRAWN},
            )
        process.errors = errors
        return process

    def _sleep(self, process, seconds):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def _send(self, process, number):
        if process.poll() is None:
            process.send_signal(number)
            self.told.append(f"  {signal.Signals(number).name}")

    def _end(self, process, number=None, also=(), strict=True):
        """Waits for a command: its exit code, and what it said."""
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
            self.faults.append(f"{process.errors.name} did not end")
        text = process.errors.read_text(errors="replace")
        self.told.append(f"  {process.errors.name}: {code} at {self._steps()}")
        allowed = {0, *also}
        if "a run does not go back" in text:  # Grown further by a start before.
            allowed.add(64)
        if number is not None:
            # Killed; or before anything of the package ran; or as it says.
            allowed |= {-signal.SIGKILL, -number, ENDS.get(number, 0)}
        if code not in allowed:
            self.faults.append(f"{process.errors.name}: {code}, {text[-800:]}")
        elif strict and "Traceback" in text:
            self.faults.append(f"{process.errors.name}: {text[-1500:]}")
        return code, text

    def _other(self, name):
        values = {"home": self.home, "count": self.count}
        flags = [x.format(**values) for x in BESIDE[name]]
        begun = self._steps()
        process = self._start(name, f"--workdir={self.workdir}", *flags)
        self._end(process, also=() if begun else (64, 74))

    def _steps(self):
        folder = self.workdir / "checkpoints"
        names = os.listdir(folder) if folder.exists() else ()
        return sorted(int(x) for x in names if x.isdigit())

    def _log(self):
        file = self.workdir / "train.log"
        return file.read_text() if file.exists() else ""

    # The end.

    def _make_reference(self):
        if (self.reference / "report.png").exists():
            return
        if self.name == "adapters":
            Life("mlp", self.reference.parents[1], "mlp")._make_reference()
        shutil.rmtree(self.reference, ignore_errors=True)
        self.reference.parent.mkdir(exist_ok=True)
        for _ in range(30):
            process = self._start("train", *self._flags(self.reference))
            code = process.wait()
            text = process.errors.read_text()
            assert code == 0, text
            if self.name == "rewound":
                again = self._start("train", *self._flags(self.reference), REWIND)
                assert again.wait() == 0, again.errors.read_text()
            if self.name != "short" or "done" in text:
                return

    def _compare(self):
        """Compares the end with the undisturbed run's."""
        faults = compared(self.workdir, self.reference)
        if self.name == "grown":  # Evaluated where it was to end before.
            faults = [x for x in faults if not x.endswith(", not None")]
        self.faults += faults
        self._end(self._start("checkpoints", f"--workdir={self.workdir}"))
        before = {x: x.read_bytes() for x in files_of(self.workdir)}
        self._end(self._train())
        after = {x: x.read_bytes() for x in files_of(self.workdir)}
        moved = {x.name for x in before.keys() ^ after.keys()}
        moved |= {x.name for x in before if before[x] != after.get(x)}
        if moved - WRITTEN_AGAIN:
            self.faults.append(f"a start of a finished run changed {sorted(moved)}")
