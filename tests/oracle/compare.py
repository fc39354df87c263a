"""Where the template and the oracle disagree, by more than rounding explains."""

import tempfile
from pathlib import Path

import jax
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from haiku_template.errors import NonFiniteError
from tests.oracle import template, texts
from tests.oracle.draw import SHAPES, epoch_of, examples, further, text_of
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
        if case["reads"] == "workdir":
            config.init_from, pretrained = template.source_run(case, config, folder)
        elif case["reads"]:
            config.init_from = str(folder / "pretrained.npz")
            pretrained = _write_pretrained(case, oracle, train, config.init_from)
        tuned = {}
        if case["adapters"]:
            file, tuned = template.adapters_of(case, config, folder)
            config.finetuning.adapters = file
        batches, first = template.beginning(case, config, oracle.num_steps)
        faults = [*_of_order(case, train, batches)]
        if case["kind"] == "packed":
            batches = _unpacked(batches)
        params, net_state = oracle.first(batches[0], pretrained)
        tuned = {k: x for k, x in (first | tuned).items() if not oracle.is_fresh(k)}
        adapters = {k: x for k, x in tuned.items() if k.endswith(ADAPTERS)}
        params |= {k: x for k, x in tuned.items() if k not in adapters}
        state = oracle.start(params, net_state, adapters)
        if case["bad"] is not None and (batches[0]["labels"]["weight"] < 0).any():
            return faults + _of_first_step(case, config, folder)
        trained = template.trained(case, config, folder)
    if case["kind"] == "noisy":
        drawn = trained["net_state"]["~/drawn"]
        faults += _of_draws(drawn[: trained["net_state"]["~/count"]])
        state.net_state["~"]["drawn"] = drawn
    if case["kind"] == "dropped":
        seen = trained["net_state"]["~/seen"]
        faults += _of_dropped(case, seen[: trained["net_state"]["~/count"]], params)
        state.net_state["~"]["seen"] = seen
    few = further(case)
    runs = [oracle.run(state, batches, test, few)]
    last = max(runs[0].lines)  # Where rounding must not stop it elsewhere.
    for n in (1, 2):
        off = _off(case, state, n)
        runs.append(oracle.run(off, batches[:last], test, few, stops=False))
    wanted, *others = [parts_of(case, run, oracle.phases) for run in runs]
    begin = flat(state.params)
    for part in sorted(trained.keys() | wanted.keys()):
        values = [x.get(part, {}) for x in (trained, wanted, *others)]
        start = begin if part in ("params", "averages") else {}
        faults += [f"{part}: {x}" for x in differences(case, start, *values)]
    return faults


def _write_pretrained(case, oracle, train, path):
    """Writes parameters of another seed, by path, and averages of norms.

    Returns them by the model's names, those of the state marked.
    """
    key, off = jax.random.key(99), np.float32(0.01)
    params, net_state = oracle.init(key, oracle.inputs(train))
    arrays = {k: np.asarray(x) + off for k, x in flat(params).items()}
    state = {}
    if oracle.config["model.name"] == "resnet":
        state = {f"state:{k}": np.asarray(x) for k, x in flat(net_state).items()}
        state = {k: x + (off if x.ndim else 0) for k, x in state.items()}  # No counter.
    lacks = case["lacks"] and "finetuning.rename" not in oracle.config
    there = {k: x for k, x in arrays.items() if not (lacks and oracle.is_fresh(k))}
    named = {_in_file(oracle.config, k): x for k, x in (there | state).items()}
    if "finetuning.ignore" in oracle.config:
        named["left/over/w"] = np.ones(3, np.float32)
    form = "graphcast" if state else case["form"]
    np.savez(path, **{_of_form(form, k): x for k, x in named.items()})
    return arrays | state


def _in_file(config, path):
    """The name in a file of what the model has as `path`."""
    mark, path = ("state:", path[6:]) if path.startswith("state:") else ("", path)
    ((pattern, _),) = config.get("finetuning.rename", (("*", "*"),))
    if pattern == "old/*":
        path = f"old/{path}"
    elif pattern == "*_x/*":
        path = "_x/".join(path.rsplit("/", 1))
    return mark + path


def _of_form(form, path):
    """A name as a publisher writes it."""
    module, name = path.rsplit("/", 1)
    if form == "graphcast":
        mark = "" if path.startswith("state:") else "params:"
        return f"{mark}{module}:{name}"
    return f"{module}//{name}" if form == "scopes" else path


def _unpacked(batches):
    """Batches of the examples in windows, as many rows in each."""
    count = max(x["inputs"]["segments"].max() for x in batches)
    return [texts.unpacked(x, count) for x in batches]


def _of_order(case, train, batches):
    """Each epoch that is whole must have each example once.

    Of buckets, which take whole batches, none may have come twice more than another.
    Of windows that are drawn, each must be one of the stream's.
    """
    kind, size = case["kind"], case["config"]["batch_size"]
    if kind == "ahead":
        yield from _of_rows_in_order(train, batches, size)
        return
    if case["config"].get("data.order") == "random":
        yield from _of_windows(case, batches)
        return
    if kind == "packed":
        yield from _of_packing(case, train, batches)
        return
    if kind == "changed":
        drawn = np.concatenate([x["inputs"][:, -1] for x in batches])
        yield from _of_draws(drawn)
        train, *batches = (_steady(x) for x in (train, *batches))
    context = case["config"].get("data.context")
    if context is not None:
        train, *batches = (texts.widened(x, context) for x in (train, *batches))
    points = lambda x: {"points": x["points"][:, 0]}  # noqa: E731
    part = points if kind == "points" else lambda x: x
    every, *rows = (texts.as_rows(part(x)) for x in (train, *batches))
    yield from _of_epochs(every, np.concatenate(rows), size, kind in SHAPES)


def _of_epochs(every, rows, size, in_buckets):
    slack, count = 0, len(every)
    if in_buckets:
        slack, count = 1, -(-count // size) * size
    each, of_each = np.unique(every, axis=0, return_counts=True)
    for end in range(count, len(rows) + 1, count):
        some, of_some = np.unique(rows[:end], axis=0, return_counts=True)
        if not np.array_equal(each, some) or np.ptp(of_some / of_each) > slack:
            yield f"order: the first {end} examples are not all as often"


def _steady(batch):
    """A batch without what is drawn."""
    return batch | {"inputs": batch["inputs"][:, :-1]}


def _of_rows_in_order(train, batches, size):
    """What only goes forward begins again at its end."""
    count = len(train["inputs"]) // size
    for step, batch in enumerate(batches):
        rows = slice(step % count * size, (step % count + 1) * size)
        if any(not np.array_equal(batch[k], x[rows]) for k, x in train.items()):
            yield f"order: step {step + 1} has another batch"


def _of_windows(case, batches):
    """Windows that are drawn are of the stream, and not always the same."""
    content, context = text_of(case)[0], case["config"]["data.context"]
    if case["kind"] == "bytes":
        content = np.frombuffer(content + b"\0", np.uint8)
    windows = {tuple(x) for x in sliding_window_view(content, context + 1)}
    drawn = [
        (*x, y[-1])
        for b in batches
        for x, y in zip(b["inputs"], b["labels"], strict=True)
    ]
    labels = [tuple(y) for b in batches for y in b["labels"]]
    if not {*drawn} <= windows or any(
        x[1:] != y for x, y in zip(drawn, labels, strict=True)
    ):
        yield "order: a window is none of the stream"
    if len({*drawn}) < min(len(drawn), 9) / 2:
        yield "order: the same windows over and over"


def _of_packing(case, train, batches):
    """Each epoch of windows has each example once, and the same windows."""
    count = epoch_of(case)[0]
    rows = [texts.as_rows(x) for x in batches]
    rows = np.concatenate(rows)
    if len(rows) < count:
        return
    first, of_first = np.unique(rows[:count], axis=0, return_counts=True)
    yield from _of_epochs(rows[:count], rows, 1, False)
    batch = {k: [] for k in ("inputs", "labels", "loss_mask")}
    for x in _unpacked(batches):
        for name, values in batch.items():
            values.append(x[name])
    arrays = {k: np.concatenate(x) for k, x in batch.items()}
    each = len(arrays["inputs"]) // len(rows)  # Rows of a window.
    arrays = {k: x[: count * each] for k, x in arrays.items()}
    arrays = {k: x[arrays["loss_mask"].any(axis=1)] for k, x in arrays.items()}
    wanted = texts.widened(train, case["config"]["data.context"])
    got, wanted = (texts.as_rows(x) for x in (arrays, wanted))
    if not np.array_equal(*(x[np.lexsort(x.T)] for x in (got, wanted))):
        yield "order: windows do not have each example once"


def _of_dropped(case, seen, params):
    """Rows that are dropped: another choice each time, and about as many as asked."""
    kept = (seen[:, : case["devices"]] != params["kept/w"]).any(axis=-1)
    kept = kept.reshape(-1, kept.shape[-1])
    if len(np.unique(kept, axis=0)) < len(kept):
        yield "dropped: the same rows twice"
    share = case["config"]["finetuning.lora.dropout"]
    limit = 5 * (share * (1 - share) / max(kept.size, 1)) ** 0.5
    if kept.size and abs(1 - kept.mean() - share) > limit:
        yield f"dropped: {1 - kept.mean():.2f} of the rows, and {share} was asked for"


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


def parts_of(case, run, ends):
    """What the oracle says of a run, in the parts that the template gives.

    `ends` are the last steps of its starts, but for one that stops early.
    """
    config = case["config"]
    parts = {"params": run.state.params, "net_state": flat(run.state.net_state)}
    has_averages = config["optimizer.name"].startswith("schedule_free")
    if has_averages or "ema_decay" in config:
        parts["averages"] = run.state.averages
    parts |= {"merged": run.params, "evaluate": run.evaluation}
    if case["asks_best"]:
        parts["best"] = run.best
    if config["model.name"] not in ("gpt", "bert"):  # Exported in Hugging Face's names.
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
    size, times = ROUNDING[case["config"].get("precision", "float32")]
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
        # Gradients are rounded, too, which no other parameters show where the
        # outputs hardly depend on them.
        limit = times * near + 1e-6 * np.linalg.norm(right)
        limit += max(size, 1e-5) * moved + 1e-9
        if not error <= limit:
            text = f"{value:.8g} {right:.8g}" if value.ndim == 0 else f"{value.shape}"
            yield f"{path} is off by {error:.2g}, limit {limit:.2g}: {text}"
