"""Cases drawn from a seed: what is asked for, as a plain dictionary, and its examples.

Left out is the dropout of models, of which nothing tells what it dropped: a model of
the kind `noisy` keeps what it draws, and one of the kind `dropped` the matrix that it
has, which shows what LoRA's dropout left of its adapter.
"""

import jax
import numpy as np

import tests.oracle.texts as texts
from tests.oracle.optimizers import NAMES

ARRAYS = ("mlp", "numbers", "weighted", "resnet", "gpt", "masked", "tokens", "points")
ARRAYS += ("noisy",)
KINDS = (*ARRAYS, "pixels", "changed", "ahead", "grain", "stream", "bytes", "lines")
KINDS += ("packed", "texts", "pairs", "dropped")
FLAT = ("mlp", "numbers", "weighted", "pixels", "changed", "ahead", "grain")
GPT = ("gpt", "masked", "tokens", *texts.STREAMS, *texts.LINES)
SHAPES = ("points", "lines", "texts")  # Batches of several.
# Of the host alone: what only goes forward, is made when asked for, or has several
# shapes.
ON_HOST = ("masked", "changed", "ahead", "grain", "packed", *SHAPES)
# Those that make one up, which a warm-up's first rate of 0 would not fit.
RATE_FREE = ("cocob", "dog", "dowg", "momo", "momo_adam", "dadapt_adamw", "prodigy")
# Their updates go by signs: rounding of a gradient of zero is a whole step.
BY_SIGN = ("sign_sgd", "signum", "lion")
OPTIONS = {  # Of their own.
    "galore": {"rank": 2, "update_proj_gap": 3},
    "prodigy": {"estim_lr0": 0.3},
    "dadapt_adamw": {"estim_lr0": 0.3},
    "radam": {"eps": 1e-3},
    "tests.oracle.optimizers:slow": {"share": 0.5},
}


def some(rng, chance, value, other):
    """A value by chance, or another."""
    return value if rng.random() < chance else other


def one(rng, *values):
    """One of the values."""
    return values[rng.integers(len(values))]


def draw(seed, kinds=KINDS, processes=1):
    """The case of a seed, of one of the kinds, which so many processes train."""
    rng = np.random.default_rng(seed)
    kind = one(rng, *kinds)
    devices = max(one(rng, 1, 1, 2, 4), processes)
    case = {"seed": seed, "kind": kind, "devices": devices}
    case |= {"devices_then": one(rng, devices, 1, 2), "stops_at": None}
    case |= {"num_train": one(rng, 21, 24, 40), "num_test": one(rng, 7, 16, 19)}
    micro = some(rng, 0.25, 2, 1)
    size = 4 * micro * one(rng, 1, 2)
    config = {"seed": int(rng.integers(9)), "batch_size": size}
    config |= {"accumulate_steps": micro} | _model(rng, kind, case)
    config |= _length(rng, kind, case) | _optimizer(rng) | _metrics(rng, case)
    config |= _precision(rng, kind, config) | _placing(rng, kind)
    config |= _finetuning(rng, kind, case, config) | _file(rng, kind, case)
    if rng.random() < 0.3 and "schedule_free" not in config["optimizer.name"]:
        config["ema_decay"] = one(rng, 0.5, 0.9)
    config |= _sums(rng, kind, case, config)
    calls = config.get("num_steps", 0) * micro
    if kind == "noisy":
        config |= {"model.calls": calls, "model.rows": size // micro}
    if kind == "dropped":
        config |= {"model.calls": calls, "finetuning.lora.dropout": one(rng, 0.3, 0.6)}
        case["devices_then"] = devices  # Each drops rows of its own.
    if config.get("precision") == "float16" and kind != "resnet":
        case["devices_then"] = devices  # Of one's examples may be infinite.
    config |= _left_out(rng, case, config)
    case["trouble"] = _trouble(rng, kind, case, config)
    case |= _processes(case, processes)
    if case["bad"] is not None:
        config["max_consecutive_nonfinite"] = 9
    case["config"] = config
    return case


def _length(rng, kind, case):
    """Steps, and a first start that is stopped, or is for fewer of them."""
    case["extends"] = False
    if kind not in ("points", "noisy", "dropped", "ahead", "grain") and (
        rng.random() < 0.3
    ):
        return {"num_epochs": one(rng, 0.4, 1.0, 1.7)}
    steps = int(rng.integers(2, 10))
    if rng.random() < 0.4:
        case["stops_at"] = int(rng.integers(1, steps))
        case["extends"] = bool(rng.random() < 0.3)
    return {"num_steps": steps}


def _model(rng, kind, case):
    case["num_outputs"], name = one(rng, 3, 5), "tests.oracle.models"
    # An example whose weight below 0 makes a step not finite.
    case["bad"] = some(rng, 0.3, 1, None) if kind == "weighted" else None
    if kind in FLAT:
        width, layers = one(rng, 8, 13), int(rng.integers(1, 3))
        keys = {"model.name": "mlp", "model.width": width, "model.num_layers": layers}
        tasks = {"numbers": "regression", "weighted": f"{name}:weighted"}
        keys |= {"task.name": tasks.get(kind, "classification")}
        return keys | some(rng, 0.2, {"model.remat": ("mlp",)}, {})
    if kind == "resnet":
        sizes = {"model.channels": one(rng, (4,), (4, 6)), "model.blocks": 1}
        sizes |= {"model.norm_decay": one(rng, 0.9, 0.5), "model.name": "resnet"}
        return sizes | {"task.name": "classification"}
    if kind == "points":
        keys = {"model.name": f"{name}:user_points", "model.width": 8}
        keys |= some(rng, 0.3, {"model.per_example": True}, {})
        return keys | {"task.name": "own_loss"}
    if kind == "noisy":
        keys = {"model.name": f"{name}:user_noisy", "model.width": 8}
        return keys | {"task.name": "classification"}
    if kind == "dropped":
        keys = {"model.name": f"{name}:user_dropped", "model.width": 8}
        return keys | {"task.name": "classification"}
    if kind in texts.BERT:
        return _bert(rng, kind)
    case["num_outputs"] = 256 if kind in ("bytes", *texts.LINES) else 11
    sizes = {"model.num_layers": 1, "model.width": 8, "model.num_heads": 2}
    sizes |= {"model.context": 24 if kind in texts.LINES else 6, "model.name": "gpt"}
    if kind == "tokens":
        sizes |= {"model.name": f"{name}:user_gpt", "task.name": f"{name}:per_token"}
        return sizes
    sizes |= {"task.name": "language_model", "task.bytes_per_token": 1.0}
    return sizes | some(rng, 0.2, {"model.remat": ("*/block_*",)}, {})


def _bert(rng, kind):
    sizes = {"model.name": "bert", "model.vocab_size": 256, "model.context": 24}
    sizes |= {"model.width": 8, "model.num_layers": 1, "model.num_heads": 2}
    sizes |= {"model.mlp_width": 12, "model.dropout": 0.0}
    sizes |= {"model.token_types": 2 if kind == "pairs" else 1}
    sizes |= {"model.pooling": one(rng, "cls", "mean")}
    return sizes | {"task.name": "classification"}


def _file(rng, kind, case):
    """Keys of a text file's data set."""
    if kind == "stream":
        some_windows = some(rng, 0.5, {"data.eval_windows": 5}, {})
        keys = {"data.context": 6, "data.order": one(rng, "random", "epochs")}
        return keys | some_windows
    if kind == "bytes":
        return {"data.context": 6, "data.order": one(rng, "random", "epochs")}
    if kind in (*texts.LINES, "texts"):
        keys = one(
            rng, {"data.context": 12, "data.truncate": True}, {"data.context": 24}
        )
        keys |= {"data.num_buckets": one(rng, 1, 2)}
        return keys | ({"data.packing": True} if kind == "packed" else {})
    return {}


def _left_out(rng, case, config):
    """Steps whose updates `--rewind` leaves out, in a start after the first."""
    case["left_out"], num_steps = (), config.get("num_steps", 0)
    if case["extends"] or case["bad"] is not None or num_steps < 3:
        return {}
    if "early_stop.patience" in config or rng.random() < 0.6:
        return {}
    some_steps = rng.integers(2, num_steps + 1, size=one(rng, 1, 1, 3))
    case["left_out"] = tuple(sorted({int(x) for x in some_steps}))
    return {"save_every": 1, "keep_last": 99}


def _trouble(rng, kind, case, config):
    """What happens between two starts: a kill, a stop more, a source that is lost."""
    if case["stops_at"] is None or case["extends"]:
        return None
    if case["left_out"]:  # It goes on without the flag.
        return some(rng, 0.5, "stops again", None)
    trains_all = not config.keys() & {"finetuning.train", "finetuning.lora.rank"}
    may_lose = case["reads"] and trains_all and kind not in (*GPT, *texts.BERT)
    if may_lose and rng.random() < 0.5:
        return "loses its source"
    return some(rng, 0.5, "killed", None)


def _processes(case, most):
    """Processes of the first start and of those after it, and how one is stopped."""
    if most == 1:
        return {"processes": (1, 1), "halt": None}
    rng = np.random.default_rng((case["seed"], 2))
    starts = case["stops_at"] is not None or case["left_out"]
    pair = one(rng, (most, most), (most, 1), (1, most)) if starts else (most, most)
    case["devices_then"] = max(case["devices_then"], pair[1])
    number = "SIGKILL" if case["trouble"] == "killed" else "SIGTERM"
    index = one(rng, *range(most), *(["all"] if number == "SIGTERM" else []))
    return {"processes": pair, "halt": (index, number)}


def _optimizer(rng):
    name = one(rng, "sgd", "adamw", "adamw", *NAMES)
    warmup = 0 if name in RATE_FREE else one(rng, 0, 0, 2, 3)
    keys = {"learning_rate": one(rng, 1e-3, 1e-2), "warmup_steps": warmup}
    shapes = ("cosine", "linear", "constant", "wsd", "tests.oracle.optimizers:falling")
    keys |= {"schedule": one(rng, *shapes)}
    keys |= {"final_fraction": one(rng, 0.0, 0.1), "name": name}
    keys |= {"weight_decay": one(rng, 0.0, 0.1, 0.5)}
    keys |= some(rng, 0.3, {"clip_norm": one(rng, 0.05, 0.5)}, {})
    if name in ("adamw", "lion", "adam"):
        keys |= some(rng, 0.5, {"b1": 0.8, "b2": 0.95}, {})
        keys |= some(rng, 0.3, {"mu_dtype": "bfloat16"}, {})
    keys |= OPTIONS.get(name, {})
    if name == "sgd":
        keys |= some(rng, 0.5, {"momentum": 0.5, "nesterov": True}, {})
    return {f"optimizer.{key}": value for key, value in keys.items()}


def _metrics(rng, case):
    keys = {"log_every": int(rng.integers(1, 4))}
    keys |= some(rng, 0.5, {"eval_every": int(rng.integers(1, 5))}, {})
    if case["kind"] not in ("lines", "packed", "texts"):  # The shortest come first.
        keys |= some(rng, 0.3, {"eval_batches": 1}, {})
    keys |= some(rng, 0.3, {"save_every": int(rng.integers(1, 4))}, {})
    stopping = {"early_stop.patience": 1, "early_stop.mode": one(rng, "min", "max")}
    if not case["extends"]:
        keys |= some(rng, 0.2, stopping, {})
    # All steps that are evaluated are saved, and the best of them stays.
    case["asks_best"] = bool(rng.random() < 0.2)
    best = {"save_every": keys.get("eval_every")}
    return keys | (best if case["asks_best"] else {})


def _precision(rng, kind, config):
    if (
        kind in ("points", "weighted", "tokens", "noisy", "dropped", "packed")
        or config["optimizer.name"] in BY_SIGN
    ):
        return {}
    return {"precision": one(rng, "float32", "float32", "bfloat16", "float16")}


def _placing(rng, kind):
    """What changes no number."""
    moments, all_of_it = (("opt_state/*", "data"),), (("*", "data"),)
    keys = {"sharding": one(rng, (), (), moments, all_of_it)}
    keys |= some(rng, 0.1, {"optimizer.shard_moments": True}, {})
    calls = 1 if kind in SHAPES else one(rng, 1, 3, 50)
    keys |= some(rng, 0.6, {"steps_per_call": calls}, {})
    keys |= some(rng, 0.2, {"max_consecutive_nonfinite": 3}, {})
    keys |= some(rng, 0.1, {"sdc_replay": "first:2,every:3"}, {})
    keys |= some(rng, 0.2, {"save_minutes": 0.0}, {})
    staged = one(rng, "host", "host", "device", "auto")
    keys |= {"data.placement": "host" if kind in ON_HOST else staged}
    has_workers = keys["data.placement"] != "device" and rng.random() < 0.05
    may_have = kind != "ahead"  # Others cannot read what only goes forward.
    return keys | ({"data.workers": 2} if has_workers and may_have else {})


def _sums(rng, kind, case, config):
    """How gradients are added up over the devices."""
    if kind in ("noisy", "dropped", "packed"):
        return {}
    if rng.random() < 0.15:
        calls = {"steps_per_call": 1} if "steps_per_call" in config else {}
        keys = {"exact_elastic": 4, "sharding": (), "optimizer.shard_moments": False}
        return keys | calls
    rounds = kind != "resnet" and config["optimizer.name"] not in BY_SIGN
    if rounds and rng.random() < 0.2:  # Statistics of norms are of all devices.
        case["devices_then"] = case["devices"]
        return {"reduce_dtype": "bfloat16"}
    return {}


def _finetuning(rng, kind, case, config):
    parts = {
        **dict.fromkeys(FLAT, "mlp/~/linear_0/*"),
        **dict.fromkeys(GPT, "gpt/block_0/mlp/*"),
        **dict.fromkeys(texts.BERT, "bert/block_0/mlp/*"),
        "resnet": "head/*",
        "points": "mlp/~/linear_1/*",
        "noisy": "linear_1/*",
        "dropped": "linear/*",
    }
    keys, part = {}, parts[kind]
    reads = one(rng, "file", "file", "workdir")
    if kind in ("noisy", "dropped"):  # Another run's state is of its own steps.
        reads = "file"
    case["reads"] = some(rng, 0.4, reads, None) if kind != "dropped" else reads
    if case["reads"]:
        keys |= some(rng, 0.3, {"finetuning.fresh": (part,)}, {})
    # Of vectors galore has empty arrays, which are not saved: adapters are matrices.
    of_matrices = config["optimizer.name"] == "galore" or kind == "dropped"
    if not of_matrices and rng.random() < 0.3:
        keys["finetuning.train"] = (part,)
    if of_matrices or rng.random() < 0.25:
        keys |= _lora(rng, kind)
        if "finetuning.fresh" in keys:  # It would be frozen.
            keys["finetuning.train"] = (part,)
    is_part = keys.keys() - {"finetuning.fresh"}
    exports = case["reads"] and kind not in ("resnet", "noisy", "dropped")
    how = one(rng, "written", "exported") if exports else "written"
    case["adapters"] = some(rng, 1.0 if kind == "dropped" else 0.3, how, None)
    case["adapters"] = case["adapters"] if is_part else None
    if is_part and kind != "dropped" and rng.random() < 0.5:
        dtype = one(rng, "bfloat16", "int8", "nf4")
        keys["finetuning.base_dtype"] = dtype
        pattern = "*/offset" if kind == "resnet" else "*/b"
        keys |= some(rng, 0.3, {"finetuning.unquantized": (pattern,)}, {})
        if dtype == "nf4" and "model.width" in config:
            keys["model.width"] = 64
    if rng.random() < 0.2 and "schedule_free" not in config["optimizer.name"]:
        pairs = ((one(rng, "*", "*w*", "*b*"), 0.25), ("*", 0.5))
        keys["finetuning.multipliers"] = pairs[: one(rng, 1, 2)]
    return keys | _names(rng, case)


def _names(rng, case):
    """Names of the file that is read, which differ from the model's by chance."""
    case["form"] = one(rng, "graphcast", "haiku", "scopes")
    case["lacks"] = bool(rng.random() < 0.5)  # What is fresh.
    source = {"eval_every": one(rng, 1, 2, None), "save_every": one(rng, 1, 2)}
    source |= {"keep_last": one(rng, 1, 9), "best_mode": one(rng, "min", "max")}
    own = {"optimizer.name": "schedule_free_sgd"} if case["seed"] % 2 else {}
    case["source"] = source | some(rng, 0.5, {"ema_decay": 0.7}, own)
    if case["reads"] != "file":
        return {}
    pair = one(rng, ("old/*", "*"), ("*_x/*", "*/*"))
    keys = some(rng, 0.4, {"finetuning.rename": (pair,)}, {})
    return keys | some(rng, 0.4, {"finetuning.ignore": ("left/*",)}, {})


def _lora(rng, kind):
    keys = {"finetuning.lora.rank": 2, "finetuning.lora.alpha": one(rng, 2.0, 6.0)}
    patterns = {
        **dict.fromkeys((*GPT, *texts.BERT), ("*/attention/*/w",)),
        **dict.fromkeys(FLAT, ("mlp/~/linear_1/w",)),
        "resnet": ("*conv*/w",),
        "points": ("mlp/~/linear_0/w",),
        "noisy": ("linear/w",),
        "dropped": ("kept/w",),
    }
    words = ("each in in out", "in out in out")
    axes = (("*", one(rng, *words)),) if kind == "resnet" else (("*", "out in"),)
    if kind != "dropped":  # Its rows are inputs.
        keys |= some(rng, 0.3, {"finetuning.lora.axes": axes}, {})
    return keys | {"finetuning.lora.patterns": patterns[kind]}


def examples(case):
    """Training and test examples of a case: trees of arrays [N, ...] each."""
    rng = np.random.default_rng((case["seed"], 1))
    sizes = case["num_train"], case["num_test"]
    if case["kind"] in (*texts.STREAMS, *texts.LINES, "texts"):
        contents = text_of(case)
        train, test = (texts.examples_of(case, x) for x in contents)
        if case["kind"] not in texts.STREAMS:
            length = texts.length_of(case, contents)
            train, test = (texts.cut(x, length) for x in (train, test))
        count, most = case["num_test"], case["config"].get("data.eval_windows")
        if most is not None and most < count:  # Spread evenly.
            rows = np.arange(most) * count // most
            test = {k: x[rows] for k, x in test.items()}
        return train, test
    parts = [_examples(rng, case["kind"], n, case["num_outputs"]) for n in sizes]
    if case["bad"] is not None:
        parts[0]["labels"]["weight"][case["bad"]] = -1
    return parts


def epoch_of(case):
    """How many examples an epoch has, and batches that are shuffled together."""
    train, kind, size = examples(case)[0], case["kind"], case["config"]["batch_size"]
    count, block = len(jax.tree.leaves(train)[0]), 1
    if kind == "packed":
        context = case["config"]["data.context"]
        count = texts.pack(texts.sizes_of(case, text_of(case)[0]), context)
    if kind in SHAPES:
        block = -(-count // size)
    return count, block


def text_of(case):
    """What the files of a case have to train on and to evaluate; bytes of one file."""
    rng, kind = np.random.default_rng((case["seed"], 1)), case["kind"]
    sizes = case["num_train"], case["num_test"]
    train, test = (texts.draw_texts(rng, kind, n, case) for n in sizes)
    if kind == "bytes":
        return train.encode(), test.encode()
    return train, test


def further(case):
    """Sets that are evaluated beside the test examples, by name."""
    if case["kind"] not in ("weighted", "tokens"):
        return {}
    return {"few": jax.tree.map(lambda x: x[-9:], examples(case)[0])}


def _examples(rng, kind, n, classes):
    labels = rng.permutation(np.arange(n) % classes).astype(np.int32)
    if kind in ("mlp", "weighted", "noisy", "changed", "ahead", "grain", "dropped"):
        width = 40 if kind == "dropped" else 5
        x = rng.normal(size=(n, width)).astype(np.float32)
        weights = rng.integers(0, 5, size=n) * np.float32(0.75) + (labels == 0)
        named = {"class": labels, "weight": weights.astype(np.float32)}
        return {"inputs": x, "labels": named if kind == "weighted" else labels}
    if kind == "pixels":
        x = rng.integers(256, size=(n, 3, 3, 1)).astype(np.uint8)
        return {"inputs": x, "labels": labels}
    if kind == "pairs":
        mask = np.arange(10) < rng.integers(2, 11, size=(n, 1))
        tokens, types = rng.integers(256, size=(n, 10)), rng.integers(2, size=(n, 10))
        inputs = {"tokens": tokens * mask, "mask": mask, "token_types": types * mask}
        inputs = {k: x.astype(np.int32) for k, x in inputs.items()}
        return {"inputs": inputs, "labels": labels}
    if kind == "numbers":
        x, y = (rng.normal(size=(n, k)).astype(np.float32) for k in (5, classes))
        return {"inputs": x, "labels": y}
    if kind == "resnet":
        x = rng.normal(size=(n, 6, 6, 2)).astype(np.float32)
        return {"inputs": x, "labels": labels}
    if kind == "points":
        lengths = rng.integers(1, 9, size=(n, 1))
        lengths = lengths[np.argsort(lengths[:, 0] > 3, kind="stable")]  # By bucket.
        mask = np.arange(8) < lengths
        points = rng.normal(size=(n, 8, 3)).astype(np.float32) * mask[..., None]
        return {"points": points, "mask": mask}
    tokens = rng.integers(0, classes, size=(n, 7)).astype(np.int32)
    tokens[0, :classes] = np.arange(classes)[:7]
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:].copy()}
    if kind == "masked":
        batch["loss_mask"] = rng.random(size=(n, 6)) < 0.6
    if kind == "tokens":
        weight = rng.integers(0, 3, size=(n, 6)).astype(np.float32)
        batch["labels"] = {"class": batch["labels"], "weight": weight}
    return batch
