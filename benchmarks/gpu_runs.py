"""Commands as users type them, on a GPU: their exit codes, speed and memory.

    python -m benchmarks.gpu_runs

GPT-2 124M trains on random tokens, one run at a time, since these are timed; the other
commands run several at a time. Nothing is downloaded. Prints a line for each, writes
benchmarks/results/gpu-runs-YYYY-MM-DD.json, and is stopped after seven minutes. With
--quick --device=cpu the same commands run small, where there is no card.
"""

import argparse
import atexit
import datetime
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.rounds import versions
from haiku_template.devices.selection import why_no_gpu
from haiku_template.storage.workdir import write_atomically
from jax_doctor import Machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHILD = "from benchmarks import gpu_runs; gpu_runs.command()"
PEAK = "peak bytes in use: "
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
# A step that takes more memory than a card has; the budget is told of a larger card.
HUGE = """
from configs import gpt2_124m

def get_config():
    config = gpt2_124m.get_config()
    config.batch_size, config.accumulate_steps = 256, 1
    config.model.attention = "xla"
    return config
"""


class Command(NamedTuple):
    """A command, what it ends with, and how."""

    name: str
    module: str
    flags: tuple[str, ...] = ()
    code: int = 0
    xla_flags: str = ""
    stop_at: int | None = None  # Sends SIGTERM once metrics of this step are there.


def command() -> None:
    """In a child process: runs the module of the first argument; prints its peak."""
    import jax  # Its own exit handlers come first, and run last.

    module = sys.argv.pop(1)

    def print_peak() -> None:
        stats = jax.devices()[0].memory_stats() or {}
        print(f"{PEAK}{stats.get('peak_bytes_in_use')}", file=sys.stderr)

    atexit.register(print_peak)
    runpy.run_module(f"haiku_template.{module}", run_name="__main__", alter_sys=True)


def train(name: str, config: str, *flags: str, **options: Any) -> Command:
    """The command that trains a config in the workdir of its name."""
    flags = f"--config=configs/{config}.py", f"--workdir=runs/{name}", *flags
    return Command(name, "train", flags, **options)


def timed(quick: bool) -> list[Command]:
    """GPT-2 124M in several sizes, each alone on the card."""

    def gpt2(name: str, batch: int, parts: int, steps: int, *flags: str) -> Command:
        small = ("--config.model.num_layers=1", "--config.model.width=64") * quick
        small += ("--config.model.num_heads=1",) * quick
        return train(
            f"gpt2 {name}".replace(" ", "_"),
            "gpt2_124m",
            "--config.data.path=tokens.bin",
            "--config.data.validation_path=few.bin",
            "--config.data.eval_windows=8",
            f"--config.batch_size={2 * parts if quick else batch}",
            f"--config.accumulate_steps={parts}",
            f"--config.num_steps={4 if quick else steps}",
            "--config.log_every=2",
            *small,
            *flags,
        )

    pinned = '--config.sharding=(("opt_state/*", None, "pinned_host"),)'
    return [
        gpt2("480 in 5", 480, 5, 10),
        gpt2("64", 64, 1, 40, "--profile=2:3" if quick else "--profile=30:33"),
        gpt2("128", 128, 1, 20),
        gpt2("8", 8, 1, 100),
        gpt2("32", 32, 1, 40),
        gpt2("32 moments on host", 32, 1, 20, pinned),
    ]


def others(quick: bool) -> list[list[Command]]:
    """Commands whose end counts, in stages: later ones read what earlier ones wrote."""
    bytes_steps = f"--config.num_steps={20 if quick else 400}"
    small = ("--config.model.channels=(4,)", "--config.model.blocks=1") * quick
    small += (f"--config.num_steps={20 if quick else 200}",)
    replay = "--config.sdc_replay=first:4,every:10"
    long = f"--config.num_steps={3000 if quick else 20_000}"
    host = '--config.sharding=(("opt_state/*", None, "pinned_host"),)'
    short = ("--config.num_steps=40",)
    helped = "finetune_gpt_bytes_lora", "--config.init_from=runs/bytes", *short
    full = ("--config=huge.py", "--workdir=runs/full", "--config.data.path=tokens.bin")
    full += ("--device_memory_limit=900GiB",)
    return [
        [
            Command("doctor", "doctor"),
            train("bytes", "gpt_bytes", bytes_steps, "--config.eval_every=None"),
            train("bytes_replayed", "gpt_bytes", "--config.num_steps=40", replay),
            train("digits", "digits"),
            train("one_a_call", "digits", "--config.steps_per_call=1"),
            train("fifty_a_call", "digits", "--config.steps_per_call=50"),
            train("moments_on_host", "digits", "--config.steps_per_call=1", host),
            train("sharded", "digits", "--config.sharding=(('*', 'data'),)"),
        ],
        [
            train("digits_replayed", "digits", replay),
            train("resnet_replayed", "digits_resnet", *small, replay),
            train(
                "resnet_replayed_deterministic",
                "digits_resnet",
                *small,
                replay,
                xla_flags=DETERMINISTIC,
            ),
            train("resnet_bfloat16", "digits_resnet", *small),
            train("stopped", "digits", long, code=75, stop_at=1000),
            train("unstopped", "digits", long),
            train("check", "digits", "--check"),
            train("half", "gpt_bytes", *short, "--config.precision=float16"),
        ],
        [
            train("stopped", "digits", long),  # Goes on.
            train("lora", *helped),
            train("lora_int8", *helped, "--config.finetuning.base_dtype=int8"),
            train("lora_nf4", *helped, "--config.finetuning.base_dtype=nf4"),
            Command(
                "generate",
                "generate",
                ("--workdir=runs/bytes", "--prompt=def main(", "--seed=0"),
            ),
            Command("evaluate", "evaluate", ("--workdir=runs/digits",)),
            Command(
                "predict", "predict", ("--workdir=runs/digits", "--output=out.npz")
            ),
            Command(
                "export",
                "export",
                ("--workdir=runs/digits", "--format=safetensors", "--output=exported"),
            ),
        ],
        [] if quick else [Command("full card", "train", full, code=77)],
    ]


def run(command: Command, folder: Path, device: str, seconds: float) -> dict[str, Any]:
    """Runs a command in a folder; returns what became of it."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {command.xla_flags}".strip(),
    }
    flags = command.flags
    if command.module == "doctor":  # It takes no such flags.
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    else:
        flags += (f"--device={device}", "--gpu_preallocate=false")
    arguments = [command.module, *flags]
    rows = folder / "runs" / command.name / "metrics.jsonl"
    begun = time.monotonic()
    # Files, not pipes: a child waits where nobody reads a full pipe.
    with _text_file() as stdout, _text_file() as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments],
            cwd=folder,
            env=environment,
            stdout=stdout,
            stderr=stderr,
        )
        killed = _wait(process, rows, command.stop_at, begun + seconds)
        output, errors = (file.seek(0) or file.read() for file in (stdout, stderr))
    errors += f"\nkilled after {seconds:.0f} s" * killed
    lines = errors.strip().splitlines()
    peaks = [line.removeprefix(PEAK) for line in lines if line.startswith(PEAK)]
    lines = [line for line in lines if not line.startswith(PEAK)]
    found = {
        "command": " ".join(["python -m", f"haiku_template.{arguments[0]}", *flags]),
        "exit_code": process.returncode,
        "as_expected": process.returncode == command.code,
        "seconds": round(time.monotonic() - begun, 1),
        "peak_bytes_in_use": next((int(x) for x in peaks if x.isdigit()), None),
        "output": output[-3000:],
        "errors": "\n".join(lines)[-3000:],
    }
    return found | _metrics(rows)


def _text_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", errors="replace")


def _wait(
    process: subprocess.Popen, rows: Path, stop_at: int | None, until: float
) -> bool:
    """Waits for a process, and stops it at a step; True if it had to be killed."""
    while process.poll() is None and time.monotonic() < until:
        if stop_at and _step(rows) >= stop_at:
            process.send_signal(signal.SIGTERM)
            stop_at = None
        time.sleep(0.05)
    killed = process.poll() is None
    process.kill()
    process.wait()
    return killed


def _rows(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _step(path: Path) -> int:
    return max((row["step"] for row in _rows(path)), default=0)


def _metrics(path: Path) -> dict[str, Any]:
    """The last loss, and the speed between two rows, without the first of compiling."""
    rows = _rows(path)
    found = {}
    for name in ("perf/tokens_per_second", "perf/examples_per_second"):
        values = [row[name] for row in rows if row.get(name)][1:]
        if values:
            middle = statistics.median(values)
            spread = {"median": middle, "min": min(values), "max": max(values)}
            found[name.removeprefix("perf/")] = spread
    for name in ("train/loss", "eval/loss"):
        losses = [row[name] for row in rows if name in row]
        found |= {name: losses[-1]} if losses else {}
    return found


def main() -> int:
    """Runs all, prints a line for each, and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=400, help="for all of it")
    today = datetime.date.today().isoformat()
    output = RESULTS / f"gpu-runs-{today}.json"
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--folder", type=Path, help="for the runs, which then stay")
    flags = parser.parse_args()
    if flags.device == "gpu" and not Machine.here().has_card():
        print(f"{why_no_gpu()}\nNothing was measured, and nothing was written.")
        return 0
    # Before anything is measured, which no failure of these can then lose.
    about = {"date": today, "device": _device(), "versions": versions()}
    until, results, lock = time.monotonic() + flags.seconds, {}, threading.Lock()
    with tempfile.TemporaryDirectory() as name:
        folder = flags.folder or Path(name)
        _prepare(folder)

        def one(command: Command) -> None:
            left = max(until - time.monotonic(), 1)
            found = run(command, folder, flags.device, min(left, 150))
            with lock:
                label = command.name + " again" * (command.name in results)
                results[label] = found
                _show(label, found)
                text = json.dumps(about | {"commands": results}, indent=1)
                write_atomically(flags.output, text + "\n")

        for command in timed(flags.quick):
            one(command)
        for stage in others(flags.quick):
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(one, stage))
    return int(not all(found["as_expected"] for found in results.values()))


def _prepare(folder: Path) -> None:
    """Writes files that the commands read: configs, and random tokens."""
    import numpy as np

    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "huge.py").write_text(HUGE)
    rng = np.random.default_rng(0)
    for name, size in {"tokens.bin": 4_000_000, "few.bin": 20_000}.items():
        rng.integers(0, 50257, size, np.uint16).tofile(folder / name)


def _device() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.check_output(command, text=True, timeout=20).strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _show(name: str, found: dict[str, Any]) -> None:
    speed = found.get("tokens_per_second", {}).get("median")
    peak = found["peak_bytes_in_use"]
    parts = [f"{name:>32} {found['seconds']:6.1f} s  code {found['exit_code']}"]
    parts += [f"{speed:,.0f} tokens/s"] if speed else []
    parts += [f"{peak / 2**30:.2f} GiB"] if peak else []
    losses = [key for key in ("train/loss", "eval/loss") if key in found]
    parts += [f"{key} {found[key]:.6g}" for key in losses]
    print("  ".join(parts), flush=True)
    if not found["as_expected"]:
        print(found["errors"][-1500:], flush=True)


if __name__ == "__main__":
    sys.exit(main())
