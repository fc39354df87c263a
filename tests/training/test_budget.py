import ast
import functools
import io

import haiku as hk
import jax
import numpy as np
import optax
import pytest
from rich.console import Console

from configs import digits, digits_resnet
from haiku_template.devices import DeviceManager
from haiku_template.devices.layout import device_bytes
from haiku_template.devices.manager import COMPILE_ONCE
from haiku_template.errors import ConfigError
from haiku_template.preflight import budget as budgets
from haiku_template.preflight.budget import check_budget, memory_budget
from haiku_template.reporting import report
from haiku_template.reporting.display import in_units, parse_bytes
from haiku_template.reporting.perf import Work
from haiku_template.runs import train
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, Trainer
from haiku_template.training.feed import Prefetcher
from tests.runs import changed, run_steps


def build(module, num_devices=1, **changes):
    config = module.get_config()
    for key, value in changes.items():
        config[key] = value
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    return Experiment.from_config(config, devices).trainer(devices)


@pytest.mark.slow(but="digits-4")
@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("module", [digits, digits_resnet])
def test_the_budget_is_what_the_compiled_step_uses(module, num_devices):
    trainer = build(module, num_devices)
    devices = trainer.devices
    before = len(jax.live_arrays())
    budget = memory_budget(trainer)
    assert len(jax.live_arrays()) <= before  # From shapes alone.
    state = trainer.init()
    host_arrays = trainer.feed.host_shapes()[0]
    batch = devices.shard(host_arrays)
    used = trainer.trace(host_arrays).lower().compile().memory_analysis()
    peak = (
        used.argument_size_in_bytes
        + used.temp_size_in_bytes
        + used.output_size_in_bytes
        - used.alias_size_in_bytes
    )
    assert budget.step_peak == pytest.approx(peak, rel=0.01)

    def on_first_device(tree):
        leaves = jax.tree.leaves(tree)
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

    assert budget.params == on_first_device(state.params)
    assert budget.opt_state == on_first_device(state.opt_state)
    assert budget.net_state == on_first_device(state.net_state)
    assert budget.batch == on_first_device(batch)
    arguments = on_first_device((state, batch))
    assert budget.step_peak >= arguments + budget.temporaries


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_a_setting_that_fits_and_agrees(tmp_path):
    trainer = build(digits_resnet, model=small())
    parted = changed(trainer, accumulate_steps=4)
    limit = memory_budget(parted).peak
    with pytest.raises(ConfigError) as caught:
        train(trainer, num_steps=10, workdir=tmp_path / "a", memory_limit=limit)
    assert not (tmp_path / "a").exists()
    words = str(caught.value)
    assert "the largest arrays of the state are .params['head']" in words
    parts = int(words.split("--config.accumulate_steps=")[1].split()[0])
    assert 2 <= parts <= 4
    suggested = changed(trainer, accumulate_steps=parts)
    options = {"num_steps": 10, "log_every": 1}
    train(suggested, workdir=tmp_path / "b", memory_limit=limit, **options)
    train(trainer, workdir=tmp_path / "c", **options)
    losses = [
        [row["train/loss"] for row in read(tmp_path / name / "metrics.jsonl")[:10]]
        for name in "bc"
    ]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="its CPUs drop remat")
def test_rematerialized_blocks_come_before_smaller_micro_batches(optimized):
    blocks = {"name": "tests_models:blocks"}
    trainer = build(digits, model=blocks, batch_size=256)
    budget = memory_budget(trainer)
    limit = budget.peak - budget.temporaries // 2
    with pytest.raises(ConfigError) as caught:
        check_budget(trainer, limit)
    words = str(caught.value)
    assert "it fits with remat of block_*, " in words
    given = words.split('--config.model.remat="')[1].split('"')[0]
    blocks["remat"] = ast.literal_eval(given)
    again = build(digits, model=blocks, batch_size=256)
    found = check_budget(again, limit)
    assert f"remat of block_*, {in_units(found.peak)} and" in words
    assert found.temporaries < budget.temporaries / 2
    losses = [[h["loss"] for h in run_steps(t, 5)[1]] for t in (trainer, again)]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-6)


def small():
    """Without batch statistics, which belong to the parts and not to the whole."""
    return {"name": "tests_models:convolutions"}


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    (tmp_path / "tests_models.py").write_text(
        "import haiku as hk, jax\n"
        "def convolutions(num_outputs, axis_name):\n"
        "    def forward(inputs, is_training):\n"
        "        x = hk.Conv2D(16, 3)(inputs)\n"
        "        x = hk.Conv2D(16, 3)(jax.nn.gelu(x))\n"
        "        return hk.Linear(num_outputs, name='head')(hk.Flatten()(x))\n"
        "    return hk.transform(forward)\n"
        "class Block(hk.Module):\n"
        "    def __call__(self, x):\n"
        "        return x + hk.Linear(64)(jax.nn.gelu(hk.Linear(512)(x)))\n"
        "def blocks(num_outputs, axis_name):\n"
        "    def forward(inputs, is_training):\n"
        "        x = hk.Linear(64)(hk.Flatten()(inputs))\n"
        "        for i in range(12):\n"
        "            x = Block(name=f'block_{i}')(x)\n"
        "        return hk.Linear(num_outputs)(x)\n"
        "    return hk.transform(forward)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.slow
def test_what_can_never_fit_says_the_least(monkeypatch):
    monkeypatch.setattr(budgets, "_init_peak", lambda *_: 0)
    trainer = build(digits, batch_size=4)
    parted = [changed(trainer, accumulate_steps=parts) for parts in (1, 2, 4)]
    least = min(memory_budget(each).peak for each in parted)
    words = f"no accumulate_steps is enough: the least is {in_units(least)}"
    with pytest.raises(ConfigError, match=words):
        check_budget(trainer, least - 1)


def test_a_state_that_does_not_fit_is_told_at_once(monkeypatch):
    trainer = build(digits)
    budget = memory_budget(trainer)
    kept = budget.params + budget.opt_state + budget.batch + budget.waiting
    monkeypatch.setattr(Experiment, "trainer", None)  # Nothing is tried.
    words = rf"is enough: {in_units(kept)} are what the run keeps, its state"
    with pytest.raises(ConfigError, match=words):
        check_budget(trainer, kept - 1)


@pytest.mark.slow
def test_making_the_first_state_is_counted_and_refused_where_it_does_not_fit():
    """SGD of a large layer: its random bits are more than a step's temporaries."""
    trainer = build(digits, batch_size=4, model={"name": "mlp", "width": 2048})
    trainer = changed(trainer, optimizer=optax.sgd(1e-3))
    init = functools.partial(trainer.functions().init, {})
    once = jax.jit(init, compiler_options=COMPILE_ONCE)
    used = once.lower().compile().memory_analysis()
    budget = memory_budget(trainer)
    assert budget.init_peak == (
        trainer.initializer.seed.nbytes
        + used.output_size_in_bytes
        + used.temp_size_in_bytes
    ) and (budget.peak >= budget.init_peak)
    limit = 2 * budget.step_peak - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets, "_init_peak", lambda *_: 2 * budget.step_peak)
        words = f"{in_units(limit + 1)} are what making the first state needs"
        with pytest.raises(ConfigError, match=words):
            check_budget(trainer, limit)
        check_budget(trainer, limit, starts=False)  # What resumes does not make it.


@pytest.mark.parametrize("num_devices", [1, 4])
def test_all_batches_that_can_be_alive_are_counted(num_devices):
    """Those in the queue, in the hands of its thread, and of each step in flight."""
    trainer = build(digits, num_devices)
    budget = memory_budget(trainer)
    queue = Prefetcher(lambda step: None, range(0, 1))._places.qsize()
    flight = trainer.devices.steps_in_flight
    assert flight == (4 if num_devices == 1 else 1)
    assert budget.waiting + budget.batch == (queue + 1 + flight) * budget.batch


def test_the_shares_of_moments_are_there_beside_an_evaluation():
    trainer = build(digits, 4, sharding=(("*", "data"),))
    evaluation = trainer.lower_evaluation().compile().memory_analysis()
    beside = budgets._evaluation_peak(trainer) - budgets._peak(evaluation)
    assert beside >= device_bytes(trainer.abstract.opt_state) > 0


@pytest.mark.parametrize("exact", [None, 1])
def test_staged_data_are_there_beside_all_else(exact):
    host = build(digits, exact_elastic=exact)
    trainer = changed(host, placement="device")
    budget = memory_budget(trainer)
    assert budget.data == budgets.tree_bytes(trainer.feed.staged) > 300_000
    least = budget.resident - budget.waiting + budget.temporaries
    assert budget.step_peak >= least
    if exact is None:
        peaks = map(budgets._evaluation_peak, (host, trainer))
        assert next(peaks) + budget.data == next(peaks)


def test_measuring_the_devices_is_counted_and_comes_before_the_state(
    tmp_path, monkeypatch
):
    trainer = build(digits)
    assert memory_budget(trainer).matmul == 0
    monkeypatch.setattr(Trainer, "work", Work(1, 1e6))
    budget = memory_budget(trainer)
    assert budget.matmul == 2 * 4 * 2048**2 and budget.peak >= budget.matmul
    limit = max(budget.step_peak + budget.waiting, budget.init_peak)
    bounded = check_budget(trainer, limit)  # A smaller product will do.
    assert 0 < bounded.matmul <= limit == bounded.peak
    before, states = [], []

    def measured(devices, dtype, most):
        before.append((most, len(states)))
        return 1e9

    first = type(trainer).init
    monkeypatch.setattr(report, "matmul_peak", measured)
    monkeypatch.setattr(
        type(trainer), "init", lambda self: states.append(1) or first(self)
    )
    train(trainer, num_steps=1, workdir=tmp_path / "run", memory_limit=limit)
    assert before == [(bounded.matmul, 0)]


@pytest.mark.slow(but="4")
@pytest.mark.parametrize("num_devices", [1, 4])
def test_arrays_that_a_model_or_a_task_closes_over_are_warned_of(
    num_devices, monkeypatch, caplog
):
    trainer = build(digits, num_devices)
    table = jax.numpy.ones((1024, 512))
    astray = jax.device_put(jax.numpy.ones((512, 1024)), jax.devices()[5])
    of_host = np.ones((1024, 513), np.float32)
    nothing = np.ones(10, np.float32)

    @jax.jit
    def inner(x):
        return x @ table

    def forward(inputs, is_training):
        x = inner(hk.Linear(1024)(hk.Flatten()(inputs)))
        return hk.Linear(10)(x) + nothing

    def task(outputs, batch):
        values = trainer.experiment.task(outputs, batch)
        more = (outputs[:, :1] * astray[0, 0]) @ astray[:1] @ of_host
        return values | {"more": more.mean(axis=1)}

    check_budget(trainer)
    assert not caplog.text
    closing = changed(trainer, model=hk.transform(forward), task=task)
    budget = check_budget(closing)
    sizes = [x.nbytes for x in (table, astray, of_host)]
    assert budget.closed_over == sum(sizes) + nothing.nbytes
    assert budget.peak > sum(sizes)
    assert "float32[1024, 512] (2.00 MiB, on cpu:0)" in caplog.text
    assert "float32[512, 1024] (2.00 MiB, on cpu:5)" in caplog.text
    assert "float32[1024, 513] (2.00 MiB, on host (NumPy))" in caplog.text
    assert "[10]" not in caplog.text
    with pytest.raises(ConfigError):
        check_budget(closing, sum(sizes))


def test_on_the_cpu_the_process_s_own_share_is_said():
    budget = memory_budget(build(digits, 4))
    assert 2**25 < budget.process < 2**40
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(budget.table())
    shown = console.export_text()
    assert f"this process already {in_units(budget.process)}" in " ".join(
        shown.replace("│", "").split()
    )
    assert in_units(budget.process + 4 * budget.peak) in shown
    # A run says it in one line: no limit is known of a CPU's memory.
    line = budget.summary()
    assert line.startswith(f"memory    {in_units(budget.peak)} on each device")
    assert "\n" not in line and budget._replace(limit=10).summary().title


def test_what_is_beyond_a_card_s_own_memory_is_said():
    budget = memory_budget(build(digits))
    assert budget.card is None and budget._replace(limit=budget.peak).fit == "yes"
    small = budget._replace(limit=2 * budget.peak, card=budget.peak - 1)
    assert small.fit == "with host memory" and small.table().caption == budgets.BUS
    large = small._replace(card=budget.peak)
    assert large.fit == "yes" and large.table().caption is None
    assert small._replace(limit=budget.peak - 1).fit == "no"


def test_the_bytes_that_half_precision_moments_save_are_a_row():
    whole = memory_budget(build(digits))
    config = digits.get_config()
    config.optimizer.mu_dtype = "bfloat16"
    devices = DeviceManager.create("cpu", num_devices=1)
    trainer = Experiment.from_config(config, devices).trainer(devices)
    budget = memory_budget(trainer)
    assert budget.saved == {"mu_dtype": whole.params // 2} and not whole.saved
    assert budget.opt_state == whole.opt_state - whole.params // 2
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(budget.table())
    shown = " ".join(console.export_text().replace("│", "").split())
    assert f"saved by mu_dtype {in_units(whole.params // 2)}" in shown


def test_a_limit_that_is_not_known_stops_nobody():
    assert check_budget(build(digits)).limit is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("2KiB", 2048), ("1.5MiB", 3 * 2**19), ("24GiB", 24 * 2**30)],
)
def test_amounts_of_memory_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "24GB", "inf", "nan"])
def test_what_is_no_amount_of_memory_is_refused(text):
    with pytest.raises(ConfigError, match="is not an amount of memory"):
        parse_bytes(text)
