"""The checks of `benchmarks.gpu_check` that a card passes or not, whatever its speed.

They take and return what those of `benchmarks.gpu_speed` do.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_speed import FULL, NOT_ON_CPU, QUICK, Figures, Run, Scale, build
from configs import digits, digits_resnet, gpt2_124m
from haiku_template import cli
from haiku_template.data import ArrayDataset, BatchSpec, Data
from haiku_template.devices import DeviceManager, describe
from haiku_template.errors import PlacementError
from haiku_template.models.attention import attend
from haiku_template.preflight.budget import MARGIN, memory_budget
from haiku_template.preflight.targets import CARDS, target_devices
from haiku_template.runs import Result, train
from haiku_template.storage import Checkpoints
from haiku_template.training import Experiment, Trainer
from jax_doctor import children

ROOT = Path(__file__).resolve().parents[1]
LARGEST_LOSS_DIFFERENCE = 1e-3  # Between the card and the CPU, over the first steps.
LARGEST_ATTENTION_DIFFERENCE = 0.05  # Of gradients in bfloat16, as a share.
LARGEST_MEMORY_DIFFERENCE = 0.1  # Of a prediction for the card, as a share of its peak.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def device_choice(devices: DeviceManager, scale: Scale, figures: Figures) -> bool:
    """Commands in processes of their own choose the card, and refuse a missing one."""
    platform = devices.platform
    flags = {
        platform: ("--gpu_memory_fraction=0.2", "--gpu_preallocate=false"),
        f"{platform}:0": ("--gpu_memory_fraction=1.0", "--gpu_preallocate=false"),
        "auto": ("--gpu_memory_fraction=0.2", "--gpu_preallocate=true"),
    }
    for spec, memory in flags.items():
        call = "print_devices()", f"--device={spec}", "--num_devices=1", *memory
        figures[f"--device={spec}"] = child(platform, *call)
    chosen = list(figures.values())
    figures[f"--device={platform}:99"] = refused = _refusal(platform)
    passed = refused["exit_code"] == 69 and refused["a sentence"]
    for facts in chosen:
        passed &= facts.get("kind") == devices.devices[0].device_kind
        passed &= facts.get("on_host") == "cpu:0"
        passed &= facts.get("default", "").startswith(f"{platform}:")
    if platform == "cpu":
        figures["memory fraction"] = NOT_ON_CPU
        return passed
    return _memory_options_hold(*chosen, figures=figures) and passed


def _memory_options_hold(
    fifth: Figures, whole: Figures, reserved: Figures, figures: Figures
) -> bool:
    """Whether a fifth was a fifth of the whole, and reserved only where asked."""
    limits = [facts.get("bytes_limit") or 0 for facts in (fifth, whole, reserved)]
    share = limits[0] / max(limits[1], 1)
    figures["memory fraction"] = share
    passed = abs(share - 0.2) < 0.02
    pools = [facts.get("pool_bytes") for facts in (fifth, reserved)]
    if None in pools:
        return passed
    return passed and pools[0] < limits[0] / 2 and pools[1] > limits[2] / 2


def _refusal(platform: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        where = [f"--device={platform}:99", f"--workdir={folder}/run"]
        config = "--config=configs/digits.py"
        done = _run(platform, ["-m", "haiku_template.train", config, *where])
    lines = done.stderr.strip().splitlines() or [""]
    return {
        "exit_code": done.returncode,
        "a sentence": lines[-1].startswith(f"error: --device={platform}:99 names "),
        "stderr_tail": "\n".join(lines[-3:])[-600:],
    }


def operations(devices: DeviceManager, scale: Scale, figures: Figures) -> bool:
    """The doctor's operations, those that some cards got wrong among them."""
    found = children.probe_jax(60, os.environ, devices.platform, (0,))
    for stage in found.stages:
        figures[stage.operation] = stage.problem or "right"
    if not found.works():
        figures["end"] = f"in {found.unfinished or 'none'}: {found.child.last_words()}"
    return found.works()


def attention(devices: DeviceManager, scale: Scale, figures: Figures) -> bool:
    """Padding by lengths and packed segments give XLA's float32 numbers, and no NaN."""
    size = 256 if scale == QUICK else 1024
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(3, 4, size, 4, 64))
    lengths = np.array([size, size // 2 + 3, 1, 0], np.int32)
    seen = np.arange(size) < lengths[:, None]
    segments = np.sort(rng.integers(0, size // 50, seen.shape), axis=1)
    ways = {
        "lengths": (seen, {"mask": seen[:, None, None], "lengths": lengths}),
        "segments": (np.ones_like(seen), {"segments": segments}),
    }
    passed = True
    for name, (counts, options) in ways.items():
        weights = rng.normal(size=arrays.shape[1:]) * counts[..., None, None]

        def total(
            x: Any, how: str, weights: Any = weights, options: Any = options
        ) -> Any:
            return jnp.sum(attend(how, *x, **options).astype(jnp.float32) * weights)

        kinds = (("auto", jnp.bfloat16), ("xla", jnp.float32))
        found, exact = (
            np.asarray(jax.jit(jax.grad(total), static_argnums=1)(x, how), np.float32)
            for how, x in ((how, jnp.asarray(arrays, dtype)) for how, dtype in kinds)
        )
        difference = float(np.abs(found - exact).max() / np.abs(exact).max())
        leaked = float(np.abs(found[:, ~counts]).max(initial=0))
        figures[name] = {"largest difference": difference, "at padding": leaked}
        passed &= difference < LARGEST_ATTENTION_DIFFERENCE and leaked == 0
    return passed


def print_devices() -> None:
    """In a child process: prints what the device flags on its command line chose."""

    def main() -> None:
        devices = cli.device_manager()
        jax.block_until_ready(devices.shard(np.ones(2**10, np.float32)))
        with devices.on_host():
            on_host = jnp.ones(4)
        stats = devices.devices[0].memory_stats() or {}
        facts = {
            "devices": devices.describe(),
            "kind": devices.devices[0].device_kind,
            "default": describe(jnp.ones(4)),
            "on_host": describe(on_host),
            "bytes_limit": stats.get("bytes_limit"),
            "pool_bytes": stats.get("pool_bytes"),
        }
        print(json.dumps(facts))

    cli.run(main)


def child(platform: str, call: str, *flags: str, xla_flags: str = "") -> Figures:
    """What a function of this module prints in a process of its own, or its error."""
    code = f"from benchmarks import gpu_behaviour; gpu_behaviour.{call}"
    done = _run(platform, ["-c", code, *flags], xla_flags)
    if done.returncode:
        return {"error": f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def _run(
    platform: str, arguments: list[str], xla_flags: str = ""
) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ)
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {xla_flags}".strip()
    if platform == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


def prediction(devices: DeviceManager, scale: Scale, figures: Figures) -> bool | None:
    """The memory that a dry run predicts for this card, and what steps then take."""
    if devices.platform == "cpu":
        figures["prediction"] = NOT_ON_CPU
        return None
    stats, kind = devices.devices[0].memory_stats(), devices.devices[0].device_kind
    known = [name for name, card in CARDS.items() if card.name.split()[0] in kind]
    if not known:
        figures["prediction"] = f"{kind} is no target"
        return None
    size = stats.get("bytes_reservable_limit") or stats["bytes_limit"]
    card = min(known, key=lambda name: abs(CARDS[name].gigabytes * 10**9 - size))
    passed = True
    for batch_size in scale.predicted_sizes:
        flags = "--gpu_memory_fraction=0.9", "--gpu_preallocate=false"
        here = child("gpu", f"print_memory(None, {batch_size})", *flags)
        there = child("cpu", f"print_memory({card!r}, {batch_size})")
        found = figures[f"batch of {batch_size}"] = {
            "predicted, bytes": there.get("budget", there.get("error")),
            "by check_budget on the card, bytes": here.get("budget", here.get("error")),
            "peak_bytes_in_use": here.get("peak"),
        }
        if "budget" in there and here.get("peak"):
            ratio = found["predicted / measured"] = there["budget"] / here["peak"]
            passed &= abs(ratio - 1) <= LARGEST_MEMORY_DIFFERENCE
        else:
            passed = False
    return passed


def print_memory(card: str | None, batch_size: int) -> None:
    """In a child process: prints the memory of GPT-2's steps, four layers of it."""

    def main() -> None:
        devices = target_devices(card) if card else cli.device_manager(num_devices=1)
        config = gpt2_124m.get_config()
        config.batch_size, config.accumulate_steps = batch_size, 1
        config.model.num_layers = 4
        config.data = {"name": f"{__name__}:random_tokens"}
        trainer = Experiment.from_config(config, devices).trainer(devices)
        budget = memory_budget(trainer)
        # The margin of a dry run is for cards that choose otherwise.
        margin = int(MARGIN * budget.temporaries) if card else 0
        facts = {"budget": budget.step_peak - margin, "peak": None}
        if card is None:
            state, data = trainer.init(), trainer.experiment.data.train
            for step in range(3):
                batch = devices.shard(data.batch(step))
                state, _ = trainer.step(state, batch)
            jax.block_until_ready(state)
            stats = devices.devices[0].memory_stats() or {}
            facts["peak"] = stats.get("peak_bytes_in_use")
        print(json.dumps(facts))

    cli.run(main)


def random_tokens(spec: BatchSpec) -> Data:
    """Windows of 1,024 tokens of GPT-2's vocabulary, from no file."""
    tokens = np.random.default_rng(0).integers(0, 50257, (256, 1025), np.int32)
    data = ArrayDataset(tokens[:, :-1], tokens[:, 1:], spec)
    return Data(data, None, 50257)


def losses_on_cpu(devices: DeviceManager, scale: Scale, figures: Figures) -> bool:
    """The first losses of the digits MLP in float32, here and on the CPU."""

    def losses(where: DeviceManager) -> np.ndarray:
        run = Run(build(where, scale, digits, scale.mlp_steps))
        run.steps(scale.compared_steps)
        return np.array(where.fetch(run.losses))

    expected, found = losses(_cpu()), losses(devices)
    with jax.default_matmul_precision("highest"):  # A card may round to TF32 else.
        exact = losses(devices)
    figures["first loss"], figures["last loss"] = float(found[0]), float(found[-1])
    figures["largest difference"] = float(np.abs(found - expected).max())
    figures["at highest precision"] = float(np.abs(exact - expected).max())
    return figures["largest difference"] <= LARGEST_LOSS_DIFFERENCE


def transfer_guard(devices: DeviceManager, scale: Scale, figures: Figures) -> bool:
    """The whole loop makes no copy that nobody asked for; one that does is stopped."""
    trainer = build(devices, scale, digits, scale.mlp_steps)
    every = {"log_every": 5, "eval_every": 20, "save_every": 20}
    with tempfile.TemporaryDirectory() as folder:
        result = quiet_train(trainer, 60, Path(folder) / "run", **every)
    figures["steps of the guarded loop"] = int(devices.fetch(result.state.step))
    batch = trainer.experiment.data.train.batch(0)

    def outcome(copy: Callable[[Any, jax.Array], Any]) -> str:
        state = trainer.init()
        state, scalars = trainer.step(state, devices.shard(batch))
        try:
            with devices.explicit_transfers():
                copy(state, scalars["loss"])
        except (RuntimeError, PlacementError) as error:
            return str(error).split("\n")[0][:200]
        return "allowed"

    figures["fetch(loss)"] = outcome(lambda _, loss: devices.fetch(loss))
    passed = figures["fetch(loss)"] == "allowed"
    found = outcome(lambda state, _: trainer.step(state, batch))
    figures["step of a NumPy batch"] = found
    passed &= "is on host (NumPy)" in found  # It names the leaf.
    for name, copy in {"float(loss)": float, "np.asarray(loss)": np.asarray}.items():
        found = outcome(lambda _, loss, copy=copy: copy(loss))
        on_cpu = devices.platform == "cpu"
        figures[name] = NOT_ON_CPU if on_cpu else found
        passed &= on_cpu or "device-to-host" in found
    return passed


def checkpoints(devices: DeviceManager, scale: Scale, figures: Figures) -> bool:
    """Saved here and restored anywhere, bit for bit; resumed as if never stopped."""
    trainer = build(devices, scale, digits_resnet, scale.resnet_steps)
    run = Run(trainer)
    run.steps(2)
    passed = True
    with tempfile.TemporaryDirectory() as folder, Checkpoints(Path(folder)) as saved:
        saved.save(run.step, run.state.saved(), None)
        saved.wait()
        for name, where in (("on cpu", _cpu()), ("in place", devices)):
            there = build(where, scale, digits_resnet, scale.resnet_steps)
            state = saved.restore(run.step, there.abstract.saved())
            kept = devices.fetch(run.state.saved())
            found = _difference(kept, where.fetch(state))
            places = {describe(leaf) for leaf in jax.tree.leaves(state)}
            found["where"] = ", ".join(sorted(places))
            figures[f"restored {name}"] = found
            here = places == {describe(where.shard(np.zeros(1)))}
            passed &= found["bitwise_equal"] and here
    for name, found in resumed(devices, scale).items():
        figures[name] = found
    call = f"print_resumed({devices.platform!r}, quick={scale == QUICK})"
    for name, found in child(devices.platform, call, xla_flags=DETERMINISTIC).items():
        figures[f"{name}, deterministic"] = found
        passed &= name != "error" and found["bitwise_equal"]
    return passed


def resumed(devices: DeviceManager, scale: Scale) -> dict[str, Figures]:
    """How a run that stopped halfway, and one made again, differ from a whole one."""
    whole, half = scale.resumed_steps, scale.resumed_steps // 2
    trainers = {"mlp": build(devices, scale, digits, scale.mlp_steps)}
    if scale.resumed_resnet:
        steps = scale.resnet_steps
        trainers["resnet"] = build(devices, scale, digits_resnet, steps)
    differences = {}
    for name, trainer in trainers.items():
        states = []
        with tempfile.TemporaryDirectory() as folder:
            runs = (("one", whole), ("two", whole), ("three", half), ("three", whole))
            for workdir, num_steps in runs:
                result = quiet_train(trainer, num_steps, Path(folder) / workdir)
                states.append(devices.fetch(result.state))
        differences[f"{name} again"] = _difference(states[0], states[1])
        differences[f"{name} resumed"] = _difference(states[0], states[3])
    return differences


def print_resumed(platform: str, quick: bool) -> None:
    """In a child process: prints `resumed`."""
    devices = DeviceManager.create(platform, num_devices=1, gpu_preallocate=False)
    print(json.dumps(resumed(devices, QUICK if quick else FULL)))


def quiet_train(
    trainer: Trainer, num_steps: int, workdir: Path, **every: int
) -> Result:
    """`training.train`, without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return train(trainer, num_steps=num_steps, workdir=workdir, **every)


def _cpu() -> DeviceManager:
    return DeviceManager.create("cpu", num_devices=1)


def _difference(a: Any, b: Any) -> Figures:
    """Whether two trees of NumPy arrays have the same bits, and by how much not."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    gaps = [np.abs(x.astype(np.float64) - y.astype(np.float64)).max() for x, y in pairs]
    return {
        "bitwise_equal": all(x.tobytes() == y.tobytes() for x, y in pairs),
        "largest_difference": float(max(gaps)),
    }
