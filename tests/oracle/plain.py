"""The oracle: training, evaluation and prediction as the documentation says them.

Plain Haiku, optax and NumPy on one device, and nothing of haiku_template. A case is a
dictionary; `case["config"]` has keys of a config that differ from the defaults.

Parameters are flat dictionaries by path, `module/name`.
"""

import functools
import math
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.oracle.draw import epoch_of
from tests.oracle.frozen import change, fits, rounded, words_of
from tests.oracle.models import MODELS, PREPROCESS, TASKS
from tests.oracle.optimizers import make_optimizer, make_schedule

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
NORMS = (hk.BatchNorm, hk.LayerNorm)


class State(NamedTuple):
    """All that a step changes."""

    params: dict[str, Any]  # That train.
    frozen: dict[str, Any]
    net_state: dict[str, Any]
    opt_state: Any
    averages: dict[str, Any]  # Of `params`: what evaluation uses.
    scale: Any  # Of float16's loss.


class Outcome(NamedTuple):
    """What the oracle says of a run."""

    state: State
    params: dict[str, Any]  # As in evaluation: averaged and merged.
    best: dict[str, Any]  # The same, of the step with the least loss.
    lines: dict[int, dict[str, float]]  # Metrics by step.
    evaluation: dict[str, float]
    predictions: Any


def flat(tree):
    """Leaves by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")  # noqa: E731
    return {name(path): leaf for path, leaf in leaves}


def nested(leaves):
    """Haiku's form of flat parameters."""
    tree = {}
    for path, leaf in leaves.items():
        module, _, name = path.rpartition("/")
        tree.setdefault(module, {})[name] = leaf
    return tree


def to_float(dtype, tree):
    """Floating leaves in a dtype."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)


def norms_in_float32(call, args, kwargs, context):
    """Interceptor: normalization layers compute in float32."""
    if not isinstance(context.module, NORMS) or context.method_name != "__call__":
        return call(*args, **kwargs)
    outputs = call(args[0].astype(jnp.float32), *args[1:], **kwargs)
    return outputs.astype(args[0].dtype)


class Oracle:
    """A case's mathematics."""

    def __init__(self, case):
        self.config = config = case["config"]
        self.left_out = case["left_out"]
        self.preprocess = PREPROCESS.get(case["kind"], lambda x: x)
        self.rate = config.get("finetuning.lora.dropout", 0.0)
        sizes = {k[6:]: v for k, v in config.items() if k.startswith("model.")}
        self.model = MODELS[sizes.pop("name")](case["num_outputs"], **sizes)
        self.task = TASKS[config["task.name"]]
        self.dtype = DTYPES[config.get("precision", "float32")]
        self.batch_size = config["batch_size"]
        self.num_steps = config.get("num_steps")
        if self.num_steps is None:  # Rounded up to whole steps.
            self.num_steps = self.steps_of(*epoch_of(case))
        # A start for fewer steps has a schedule that ends with them.
        ends = {self.num_steps} | ({case["stops_at"]} if case["extends"] else set())
        schedules = {n: make_schedule(config, n) for n in sorted(ends)}
        self.phases = {n: (x, make_optimizer(config, x)) for n, x in schedules.items()}
        reduces = config.get("reduce_dtype") is not None
        # In float16 a gradient of fewer examples is infinite earlier.
        is_half = self.dtype == jnp.float16 and config["model.name"] != "resnet"
        alone = case["devices"] if reduces or self.rate or is_half else 1
        self.shares = config.get("exact_elastic", alone)
        self.init = jax.jit(lambda rng, inputs: self.model.init(rng, inputs, True))
        self.step = jax.jit(self.one_step, static_argnums=3)
        self.values = jax.jit(self.task_values)

    def steps_of(self, count, block):
        """Steps of so many epochs, of which whole ones end with a whole block."""
        epochs, size = self.config["num_epochs"], self.batch_size
        steps = math.ceil(epochs * count / size - 1e-9)
        blocks = math.ceil(math.floor(epochs) * count / (size * block) - 1e-9)
        return max(1, steps, blocks * block)

    def inputs(self, batch):
        """What the model takes of a batch."""
        if self.config["task.name"] == "own_loss":
            return batch
        return self.preprocess(batch["inputs"])

    def is_fresh(self, path):
        """True if a parameter starts from the seed although others are read."""
        return fits(self.config.get("finetuning.fresh", ()), path)

    def first(self, batch, pretrained=None):
        """Parameters by the seed, or what was read; and network state."""
        key = jax.random.key(self.config.get("seed", 0))
        params, net_state = self.init(key, self.inputs(batch))
        read = (pretrained or {}).items()
        read = {k: x for k, x in read if not self.is_fresh(k)}
        state = {k[6:]: read.pop(k) for k in [*read] if k.startswith("state:")}
        return flat(params) | read, nested(flat(net_state) | state)

    def start(self, params, net_state, adapters):
        """The state before the first step."""
        rank = self.config.get("finetuning.lora.rank")
        default = ("*",) if rank is None else ()
        patterns = self.config.get("finetuning.train", ()) or default
        trained = {k: x for k, x in params.items() if fits(patterns, k)} | adapters
        frozen = {k: x for k, x in params.items() if k not in trained}
        frozen = {k: rounded(self.config, k, x) for k, x in frozen.items()}
        scale = jnp.float32(2**15 if self.dtype == jnp.float16 else 1)
        opt_state = self.phases[self.num_steps][1].init(trained)
        return State(trained, frozen, net_state, opt_state, trained, scale)

    def merged(self, params, frozen, dtype, seen=None):
        """All parameters of the model, in the dtype that it computes in.

        `seen` is the matrix that the model had, where LoRA has dropped rows.
        """
        params, frozen = to_float(dtype, (params, frozen))
        rank = self.config.get("finetuning.lora.rank")
        whole = {**params, **frozen}
        for path in [k for k in whole if k.endswith("_lora_a")]:
            name = path.removesuffix("_lora_a")
            a, b = whole.pop(path), whole.pop(f"{name}_lora_b")
            if seen is not None:  # What is dropped changes nothing.
                kept = (seen != whole[name]).any(axis=-1, keepdims=True)
                a = jnp.where(kept, a / (1 - self.rate), 0)
            share = self.config.get("finetuning.lora.alpha", 16.0) / rank
            shape = whole[name].shape
            words = words_of(self.config, name, len(shape))
            whole[name] = whole[name] + change(words, shape, a, share * b)
        return whole

    def apply(self, params, frozen, net_state, batch, is_training, share=0):
        """Outputs in float32, and the new network state."""
        inputs, seen = to_float(self.dtype, self.inputs(batch)), None
        if self.rate and is_training:
            seen = net_state["~"]["seen"][net_state["~"]["count"], share]
        whole = nested(self.merged(params, frozen, self.dtype, seen))
        with hk.intercept_methods(norms_in_float32):
            outputs, new = self.model.apply(whole, net_state, None, inputs, is_training)
        return to_float(jnp.float32, outputs), to_float(jnp.float32, new)

    def task_values(self, params, frozen, net_state, batch):
        """Outputs, values and weights in evaluation."""
        outputs, _ = self.apply(params, frozen, net_state, batch, False)
        values, weights = self.weighed(self.task(outputs, batch))
        return outputs, values, weights

    def weighed(self, values):
        """Values and their weights, by default all the same."""
        weights = values.pop("example_weight", jnp.ones_like(values["loss"]))
        return values, jnp.where(weights < 0, jnp.nan, weights)

    def gradient(self, state, batch, share):
        """Gradient of the weighted sum of the losses, and all sums."""

        def loss(params):
            outputs, new = self.apply(
                params, state.frozen, state.net_state, batch, True, share
            )
            values, weights = self.weighed(self.task(outputs, batch))
            weight = jnp.sum(weights)
            sums = {k: jnp.sum(x * weights) for k, x in values.items()}
            mean = sums["loss"] / jnp.where(weight == 0, 1, weight)
            return mean * state.scale, (sums, weight, new)

        grads, (sums, weight, new) = jax.grad(loss, has_aux=True)(state.params)
        grads = {k: x / state.scale * weight for k, x in grads.items()}
        return (grads, sums, weight), new

    def accumulated(self, state, batch, share):
        """Sums over the micro-batches of a share of a batch."""
        n, total = self.config.get("accumulate_steps", 1), None
        for j in range(n):  # Every n-th row.
            micro_batch = jax.tree.map(lambda x, j=j: x[j::n], batch)
            sums, net_state = self.gradient(state, micro_batch, share)
            state = state._replace(net_state=net_state)
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        return total, state.net_state

    def averages(self, state, batch):
        """Gradients, scalars and network state of a batch, by its shares."""
        n = self.shares
        split = jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), batch)
        rows = [jax.tree.map(lambda x, i=i: x[i], split) for i in range(n)]
        results = [self.accumulated(state, x, i) for i, x in enumerate(rows)]
        add = lambda *x: functools.reduce(jnp.add, x)  # noqa: E731
        _, sums, weight = jax.tree.map(add, *(x for x, _ in results))
        weight = jnp.where(weight == 0, 1, weight)
        parts = [jax.tree.map(lambda x: x / weight * n, x[0]) for x, _ in results]
        if dtype := n > 1 and self.config.get("reduce_dtype"):
            parts = [to_float(dtype, x) for x in parts]
            total = jax.tree.map(lambda *x: add(*to_float(jnp.float32, x)), *parts)
            parts = [to_float(jnp.float32, to_float(dtype, total))]
        grads = jax.tree.map(lambda *x: add(*x) / n, *parts)
        scalars = {k: x / weight for k, x in sums.items()}
        states = [x for _, x in results]
        if n > 1:
            states = [
                jax.tree.map(lambda *x: (add(*x) / n).astype(x[0].dtype), *states)
            ]
        return grads, scalars, states[0]

    def one_step(self, state, batch, index, end):
        """One update, and its scalars; `index` counts from 0, to `end`."""
        schedule, optimizer = self.phases[end]
        grads, scalars, net_state = self.averages(state, batch)
        old, state = state, state._replace(net_state=net_state)
        scalars["grad_norm"] = optax.tree.norm(grads)
        scalars["learning_rate"] = schedule(index)
        new = self.update(state, grads, scalars["loss"], optimizer)
        finite = jnp.isfinite(scalars["grad_norm"]) & jnp.isfinite(scalars["loss"])
        if self.dtype == jnp.float16 or "max_consecutive_nonfinite" in self.config:
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        if self.dtype != jnp.float16:
            return new, scalars
        scale = jnp.where(finite, old.scale, old.scale / 2)
        return new._replace(scale=scale), scalars | {"loss_scale": scale}

    def update(self, state, grads, loss, optimizer):
        """Parameters, and their averages after it."""
        optimizer = optax.with_extra_args_support(optimizer)
        updates, opt_state = optimizer.update(
            grads, state.opt_state, state.params, value=loss
        )
        factors = self.config.get("finetuning.multipliers", ())

        def scaled(k, x):
            rates = [rate for pattern, rate in factors if fits([pattern], k)]
            return x * (rates or [1.0])[0]

        # Not in place: an optimizer's momentum may be the same dictionary.
        updates = {k: scaled(k, x) for k, x in updates.items()}
        params = optax.apply_updates(state.params, updates)
        decay, averages = self.config.get("ema_decay"), params
        if decay is not None:
            mean = lambda old, new: decay * old + (1 - decay) * new  # noqa: E731
            averages = jax.tree.map(mean, state.averages, params)
        if self.config["optimizer.name"].startswith("schedule_free"):
            averages = self.schedule_free(opt_state, params)
        return state._replace(params=params, opt_state=opt_state, averages=averages)

    def schedule_free(self, opt_state, params):
        """What a schedule-free optimizer averages."""
        kind = optax.contrib.ScheduleFreeState
        nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
        (own,) = [x for x in nodes if isinstance(x, kind)]
        return optax.contrib.schedule_free_eval_params(own, params)

    def evaluate(self, state, examples, count):
        """Metrics of the first examples, by their weights; and all outputs."""
        outputs, values, weights = self.values(
            state.averages, state.frozen, state.net_state, examples
        )
        weights = np.asarray(weights, np.float64)[:count]
        metrics = {
            k: float(np.sum(np.asarray(x)[:count] * weights) / weights.sum())
            for k, x in values.items()
        }
        if self.config["task.name"] == "classification":
            said = outputs.argmax(axis=1)[:count]
            metrics["macro_f1"] = macro_f1(examples["labels"][:count], said)
        if self.config["task.name"] == "language_model":
            metrics["perplexity"] = math.exp(metrics["loss"])
        metrics = {f"eval/{k}": x for k, x in metrics.items()}
        return metrics, jax.tree.map(np.asarray, outputs)

    def run(self, state, batches, examples, others, stops=True):
        """Trains on the batches, and evaluates where it is due and at the end.

        `others` are further examples to evaluate, by name.
        """
        lines, every = {}, self.config.get("eval_every")
        size, limit = len(jax.tree.leaves(examples)[0]), math.inf
        if "eval_batches" in self.config:
            limit = self.config["eval_batches"] * self.batch_size
        best, losses = None, []
        for step, batch in enumerate(batches, 1):
            end = min(n for n in self.phases if n >= step)
            new, scalars = self.step(state, batch, step - 1, end)
            is_left_out = step in self.left_out
            state = state if is_left_out else new
            has_none = lambda x, out=is_left_out: out or not jnp.isfinite(x)  # noqa: E731
            scalars = {  # A line has null for what is infinite, too.
                k: math.nan if has_none(x) else float(x) for k, x in scalars.items()
            }
            if self.config["task.name"] == "language_model":
                scalars["perplexity"] = math.exp(scalars["loss"])
            lines[step] = {f"train/{k}": x for k, x in scalars.items()}
            if step in self.phases or (every and step % every == 0):
                lines[step] |= self.evaluate(state, examples, min(size, limit))[0]
                for name, x in others.items():
                    count = min(len(x["inputs"]), limit)
                    metrics = self.evaluate(state, x, count)[0]
                    lines[step] |= {
                        f"eval/{name}/{k[5:]}": x for k, x in metrics.items()
                    }
                losses.append(lines[step]["eval/loss"])
                if losses.index(min(losses)) == len(losses) - 1:  # The earliest.
                    best = state
                if stops and self.is_over(losses):
                    break
        metrics, outputs = self.evaluate(state, examples, size)
        params, best = (
            self.merged(x.averages, x.frozen, jnp.float32) for x in (state, best)
        )
        return Outcome(state, params, best, lines, metrics, outputs)

    def is_over(self, losses):
        """True if the last evaluations are no better than the best one before."""
        patience = self.config.get("early_stop.patience")
        sign = -1 if self.config.get("early_stop.mode") == "max" else 1
        best = int(np.argmin([sign * x for x in losses]))
        return patience is not None and len(losses) - 1 - best >= patience


def macro_f1(labels, said):
    """F1 averaged over the classes that occur or are predicted."""
    scores = []
    for k in np.union1d(labels, said):
        right = np.sum((labels == k) & (said == k))
        scores.append(2 * right / (np.sum(labels == k) + np.sum(said == k)))
    return float(np.mean(scores))
