"""Where the template and the oracle disagree, by more than rounding explains."""

import tempfile
from pathlib import Path

import jax
import numpy as np

from haiku_template.errors import NonFiniteError
from tests.oracle import template
from tests.oracle.draw import examples, further
from tests.oracle.plain import Oracle, flat

# Rounding in each precision. The oracle trains again from parameters that are off by
# so much; what comes of it, times a factor, is what rounding may do to this case.
ROUNDING = {"float32": (3e-7, 20), "bfloat16": (4e-3, 4), "float16": (5e-4, 8)}
ADAPTERS = ("_lora_a", "_lora_b")


def disagreements(case):
    """Lines that say where a case differs; none where all agrees."""
    with tempfile.TemporaryDirectory(prefix="oracle-") as scratch:
        folder = Path(scratch)
        config, oracle = template.config_of(case, folder), Oracle(case)
        train, test = examples(case)
        pretrained = None
        if case["reads"]:
            config.init_from = str(folder / "pretrained.npz")
            pretrained = _write_pretrained(oracle, train, config.init_from)
        batches, first = template.beginning(case, config, oracle.num_steps)
        adapters = {k: x for k, x in first.items() if k.endswith(ADAPTERS)}
        params, net_state = oracle.first(batches[0], pretrained)
        state = oracle.start(params, net_state, adapters)
        faults = [*_of_order(train, batches)]
        if case["bad"] is not None and (batches[0]["labels"]["weight"] < 0).any():
            return faults + _of_first_step(case, config, folder)
        trained = template.trained(case, config, folder)
    if case["kind"] == "noisy":
        drawn = trained["net_state"]["~/drawn"]
        faults += _of_draws(drawn[: trained["net_state"]["~/count"]])
        state.net_state["~"]["drawn"] = drawn
    few = further(case)
    runs = [oracle.run(state, batches, test, few)]
    last = max(runs[0].lines)  # Where rounding must not stop it elsewhere.
    for n in (1, 2):
        off = _off(case, state, n)
        runs.append(oracle.run(off, batches[:last], test, few, stops=False))
    wanted, *others = [parts_of(case, run) for run in runs]
    begin = flat(state.params)
    for part in sorted(trained.keys() | wanted.keys()):
        values = [x.get(part, {}) for x in (trained, wanted, *others)]
        start = begin if part in ("params", "averages") else {}
        faults += [f"{part}: {x}" for x in differences(case, start, *values)]
    return faults


def _write_pretrained(oracle, train, path):
    """Writes parameters of another seed, by path, and averages of norms."""
    key, off = jax.random.key(99), np.float32(0.01)
    params, net_state = oracle.init(key, oracle.inputs(train))
    arrays = {k: np.asarray(x) + off for k, x in flat(params).items()}
    read = {"params:" + k: x for k, x in arrays.items()}
    if oracle.config["model.name"] == "resnet":
        state = {f"state:{k}": np.asarray(x) for k, x in flat(net_state).items()}
        read |= {k: x + (off if x.ndim else 0) for k, x in state.items()}  # No counter.
    np.savez(path, **{":".join(k.rsplit("/", 1)): x for k, x in read.items()})
    return arrays | {k: x for k, x in read.items() if k.startswith("state:")}


def _of_order(train, batches):
    """Each epoch that is whole must have each example once.

    Of buckets, which take whole batches, none may have come twice more than another.
    """
    in_buckets, slack = "points" in train, 0
    part = lambda x: x["points"][:, 0] if in_buckets else x["inputs"]  # noqa: E731
    rows = [part(x) for x in batches]
    every, size, rows = len(part(train)), len(rows[0]), np.concatenate(rows)
    if in_buckets:
        every, slack = -(-every // size) * size, 1
    each, of_each = np.unique(part(train), axis=0, return_counts=True)
    for end in range(every, len(rows) + 1, every):
        some, of_some = np.unique(rows[:end], axis=0, return_counts=True)
        if not np.array_equal(each, some) or np.ptp(of_some / of_each) > slack:
            yield f"order: the first {end} examples are not all as often"


def _of_first_step(case, config, folder):
    """A first step that is not finite must end the run."""
    try:
        template.trained(case, config, folder)
    except NonFiniteError:
        return []
    return ["a first step that is not finite does not end the run"]


def _of_draws(drawn):
    """No step, micro-batch or device may draw what another did."""
    if len(np.unique(drawn)) < drawn.size:
        yield "draws: the same number twice"


def _off(case, state, n):
    """The state, its parameters off by rounding, another for each n."""
    size = ROUNDING[case["config"].get("precision", "float32")][0]
    rng = np.random.default_rng(n)

    def move(x):
        noise = rng.normal(size=x.shape).astype(np.float32)
        return x * (1 + size * noise)

    params = {k: move(x) for k, x in state.params.items()}
    frozen = {k: move(x) for k, x in state.frozen.items()}
    return state._replace(params=params, averages=params, frozen=frozen)


def parts_of(case, run):
    """What the oracle says of a run, in the parts that the template gives."""
    config, ends = case["config"], {max(run.lines)}
    ends |= {case["stops_at"]} if case["extends"] else set()  # Of a first start.
    parts = {"params": run.state.params, "net_state": flat(run.state.net_state)}
    has_averages = config["optimizer.name"].startswith("schedule_free")
    if has_averages or "ema_decay" in config:
        parts["averages"] = run.state.averages
    parts |= {"merged": run.params, "evaluate": run.evaluation}
    if case["asks_best"]:
        parts["best"] = run.best
    if config["model.name"] != "gpt":  # Exported in Hugging Face's names.
        parts["exported"] = run.params
    parts["predictions"] = flat({"outputs": run.predictions})
    for step, line in run.lines.items():
        is_logged = step % config["log_every"] == 0 or step in ends
        kinds = ("train/", "eval/") if is_logged else ("eval/",)
        line = {k: x for k, x in line.items() if k.startswith(kinds)}
        if line:
            parts[f"step {step}"] = line
    return parts


def differences(case, start, trained, wanted, *others):
    """Lines on leaves of a part that differ by more than rounding."""
    times = ROUNDING[case["config"].get("precision", "float32")][1]
    for path in sorted(trained.keys() ^ wanted.keys()):
        where = "template" if path in trained else "oracle"
        yield f"{path} is in the {where}'s alone"
    for path in sorted(trained.keys() & wanted.keys()):
        value, right = (np.asarray(x[path], np.float64) for x in (trained, wanted))
        if value.shape != right.shape:
            yield f"{path} is {value.shape}, and by the oracle {right.shape}"
            continue
        none = np.isnan(value) & np.isnan(right)  # They agree that it is no number.
        value, right = (np.where(none, 0, x) for x in (value, right))
        error = np.linalg.norm(value - right)
        near = max(np.linalg.norm(np.where(none, 0, x[path]) - right) for x in others)
        moved = np.linalg.norm(right - np.asarray(start.get(path, 0)))
        limit = times * near + 1e-6 * np.linalg.norm(right) + 1e-5 * moved + 1e-9
        if not error <= limit:
            text = f"{value:.8g} {right:.8g}" if value.ndim == 0 else f"{value.shape}"
            yield f"{path} is off by {error:.2g}, limit {limit:.2g}: {text}"
