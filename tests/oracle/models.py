"""Models and tasks in plain Haiku, JAX and optax: the oracle's, and a user's own.

Shapes: B examples, F features, T tokens, L points of the longest example, V vocabulary.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

BLOCKS = hk.nets.ResNet.BlockGroup


def plain_mlp(num_outputs, width, num_layers, **_):
    """What the template's `mlp` says that it is."""

    def forward(inputs, is_training):
        return hk.nets.MLP([width] * num_layers + [num_outputs])(hk.Flatten()(inputs))

    return hk.transform_with_state(forward)


def plain_resnet(num_outputs, channels, blocks, norm_decay, **_):
    """What the template's `resnet` says that it is."""
    norm = {"create_scale": True, "create_offset": True, "decay_rate": norm_decay}
    kind = {"bn_config": norm, "resnet_v2": False, "bottleneck": False}

    def forward(inputs, is_training):
        x = hk.Conv2D(channels[0], 3, with_bias=False, name="stem")(inputs)
        x = jax.nn.relu(hk.BatchNorm(**norm, name="stem_norm")(x, is_training))
        for i, width in enumerate(channels):
            form = {"stride": 2 if i else 1, "use_projection": i > 0, **kind}
            group = BLOCKS(width, blocks, **form, name=f"group_{i}")
            x = group(x, is_training, test_local_stats=False)
        return hk.Linear(num_outputs, name="head")(x.mean(axis=(1, 2)))

    return hk.transform_with_state(forward)


def plain_gpt(num_outputs, num_layers, width, num_heads, context, **_):
    """GPT-2: tokens [B, T] to logits [B, T, V]."""

    def forward(tokens, is_training):
        small = hk.initializers.RandomNormal(0.02)
        with hk.name_scope("gpt"):
            embed = hk.Embed(num_outputs, width, w_init=small, name="embed")
            places = hk.Embed(context, width, w_init=small, name="positions")
            words, positions = embed.embeddings, places.embeddings
            x = words[tokens] + positions[: tokens.shape[1]]
            for i in range(num_layers):
                with hk.name_scope(f"block_{i}"):
                    x = _block(x, num_heads, 0.02 / (2 * num_layers) ** 0.5)
            x = _layer_norm("norm")(x)
        return jnp.matmul(x, words.T, preferred_element_type=jnp.float32)

    return hk.transform_with_state(forward)


def _layer_norm(name):
    return hk.LayerNorm(-1, True, True, name=name)


def _linear(width, name, deviation=0.02):
    return hk.Linear(width, w_init=hk.initializers.RandomNormal(deviation), name=name)


def _block(x, num_heads, deviation):
    rows, length, width = x.shape
    y = _layer_norm("norm_1")(x)
    with hk.name_scope("attention"):
        y = _linear(3 * width, "qkv")(y).astype(jnp.float32)
        heads = (rows, length, 3, num_heads, width // num_heads)
        query, key, value = jnp.moveaxis(y.reshape(heads), 2, 0)
        scores = jnp.einsum("bthc,bshc->bhts", query, key) / heads[-1] ** 0.5
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
        y = jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores), value)
        y = y.reshape(x.shape).astype(x.dtype)
        x = x + _linear(width, "projection", deviation)(y)
    y = _layer_norm("norm_2")(x)
    with hk.name_scope("mlp"):
        y = jax.nn.gelu(_linear(4 * width, "up")(y), approximate=True)
        return x + _linear(width, "down", deviation)(y)


def user_gpt(num_outputs, axis_name, **sizes):
    """The plain GPT as a model of the user's own."""
    return plain_gpt(num_outputs, **sizes)


def plain_points(num_outputs, width, **_):
    """A loss of each example [B], which counts by its points, beside their number.

    Of one example, too, without the axis of the examples.
    """

    def forward(batch, is_training):
        said = hk.nets.MLP([width, 1])(batch["points"])[..., 0]  # [B, L]
        wrong = jnp.square(said - batch["points"].sum(axis=-1)) * batch["mask"]
        count = batch["mask"].sum(axis=-1)
        scalars = {"example_weight": count, "inner": {"largest": wrong.max(axis=-1)}}
        return wrong.sum(axis=-1) / count, scalars

    return hk.transform_with_state(forward)


def user_points(num_outputs, axis_name, width):
    """The same as a model of the user's own, which takes the batch alone."""
    model = plain_points(num_outputs, width)

    def apply(params, state, rng, batch):
        return model.apply(params, state, rng, batch, True)

    return hk.TransformedWithState(
        lambda rng, batch: model.init(rng, batch, True), apply
    )


def noisy(num_outputs, width, calls, rows, draw):
    """An MLP whose hidden units are noisy in training; its state is all that it drew.

    `draw(noise, size)` gives the numbers of a call of `size` examples, and those that
    the state keeps: it has a row for each of so many calls of all devices.
    """

    def forward(inputs, is_training):
        x = hk.Linear(width)(inputs)
        drawn = hk.get_state("drawn", (calls, rows), init=jnp.zeros)
        count = hk.get_state("count", (), jnp.int32, init=jnp.zeros)
        if is_training:
            noise, row = draw(drawn[count], len(inputs))
            x = x * (1 + 0.3 * noise[:, None])
            drawn = jax.lax.dynamic_update_slice(drawn, row[None], (count, 0))
            hk.set_state("drawn", drawn)
            hk.set_state("count", count + 1)
        return hk.Linear(num_outputs)(jax.nn.relu(x))

    return hk.transform_with_state(forward)


def user_noisy(num_outputs, axis_name, **sizes):
    """The model as a user's, which draws for the examples of its device."""

    def draw(_, size):
        noise = jax.random.normal(hk.next_rng_key(), (size,))
        if axis_name is None:
            return noise, noise
        return noise, jax.lax.all_gather(noise, axis_name, tiled=True)

    return noisy(num_outputs, draw=draw, **sizes)


def plain_noisy(num_outputs, **sizes):
    """The model where the state says what was drawn."""

    def draw(row, size):
        if hk.running_init():
            hk.next_rng_key()  # Parameters behind it have the next one.
            return jnp.zeros(size), row
        return row, row

    return noisy(num_outputs, draw=draw, **sizes)


class Kept(hk.Module):
    """A product with a matrix, which is returned, too."""

    def __init__(self, width):
        super().__init__("kept")
        self.width = width

    def __call__(self, x):
        init = hk.initializers.TruncatedNormal(x.shape[-1] ** -0.5)
        w = hk.get_parameter("w", (x.shape[-1], self.width), x.dtype, init)
        return x @ w, jax.lax.stop_gradient(w)


def dropped(num_outputs, width, calls, keep):
    """An MLP whose state has the first matrix of each call, of each of four devices.

    `keep(seen, count, w)` puts the matrix of a call where the state has it.
    """

    def forward(inputs, is_training):
        x, w = Kept(width)(inputs)
        seen = hk.get_state("seen", (calls, 4, *w.shape), init=jnp.zeros)
        count = hk.get_state("count", (), jnp.int32, init=jnp.zeros)
        if is_training:
            hk.set_state("seen", keep(seen, count, w))
            hk.set_state("count", count + 1)
        return hk.Linear(num_outputs)(jax.nn.relu(x))

    return hk.transform_with_state(forward)


def user_dropped(num_outputs, axis_name, **sizes):
    """The model as a user's: each device has a matrix of its own."""

    def keep(seen, count, w):
        each = w[None] if axis_name is None else jax.lax.all_gather(w, axis_name)
        return jax.lax.dynamic_update_slice(seen, each[None], (count, 0, 0, 0))

    return dropped(num_outputs, keep=keep, **sizes)


def plain_dropped(num_outputs, **sizes):
    """The model where the state says what was seen."""
    return dropped(num_outputs, keep=lambda seen, count, w: seen, **sizes)


def plain_bert(num_outputs, width, num_layers, num_heads, mlp_width, **sizes):
    """BERT: texts [B, T] to logits [B, K]; normalized after each sum, exact GELU."""

    def forward(inputs, is_training):
        tokens, mask = inputs["tokens"], inputs["mask"]
        kinds = inputs.get("token_types", jnp.zeros_like(tokens))
        with hk.name_scope("bert"):
            embed = _table(sizes["vocab_size"], width, "embed")
            segments = _table(sizes["token_types"], width, "token_types")
            places = _table(sizes["context"], width, "positions")
            x = embed[tokens] + segments[kinds] + places[: tokens.shape[1]]
            x = _bert_norm("norm")(x)
            for i in range(num_layers):
                with hk.name_scope(f"block_{i}"):
                    x = _bert_block(x, mask, num_heads, mlp_width)
            if sizes["pooling"] == "cls":
                x = jnp.tanh(_linear(width, "pooler")(x[:, 0]))
            else:
                counts = mask[..., None].astype(jnp.float32)
                x = ((x * counts).sum(1) / counts.sum(1)).astype(x.dtype)
            return _linear(num_outputs, "head")(x)

    return hk.transform_with_state(forward)


def _table(rows, width, name):
    small = hk.initializers.RandomNormal(0.02)
    return hk.Embed(rows, width, w_init=small, name=name).embeddings


def _bert_norm(name):
    return hk.LayerNorm(-1, True, True, eps=1e-12, name=name)


def _bert_block(x, mask, num_heads, mlp_width):
    rows, length, width = x.shape
    heads = (rows, length, num_heads, width // num_heads)
    with hk.name_scope("attention"):
        query, key, value = (
            _linear(width, name)(x).reshape(heads).astype(jnp.float32)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bthc,bshc->bhts", query, key) / heads[-1] ** 0.5
        scores = jnp.where(mask[:, None, None].astype(bool), scores, -jnp.inf)
        y = jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores), value)
        y = _linear(width, "projection")(y.reshape(x.shape).astype(x.dtype))
    x = _bert_norm("norm_1")(x + y)
    with hk.name_scope("mlp"):
        y = jax.nn.gelu(_linear(mlp_width, "up")(x), approximate=False)
        y = _linear(width, "down")(y)
    return _bert_norm("norm_2")(x + y)


MODELS = {"mlp": plain_mlp, "resnet": plain_resnet, "gpt": plain_gpt}
MODELS |= {"tests.oracle.models:user_gpt": plain_gpt}
MODELS |= {"tests.oracle.models:user_points": plain_points}
MODELS |= {"tests.oracle.models:user_noisy": plain_noisy, "bert": plain_bert}
MODELS |= {"tests.oracle.models:user_dropped": plain_dropped}
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def classification(outputs, batch):
    """Values [B] of outputs [B, V], and of labels [B]."""
    correct = outputs.argmax(axis=-1) == batch["labels"]
    loss = cross_entropy(outputs, batch["labels"])
    return {"loss": loss, "accuracy": correct.astype(jnp.float32)}


def weighted(outputs, batch):
    """The same, where each example has a weight of its own, perhaps 0."""
    labels = {"labels": batch["labels"]["class"]}
    weight = batch["labels"]["weight"]
    return classification(outputs, labels) | {"example_weight": weight}


def per_token(outputs, batch):
    """Values and weights of tokens [B, T]."""
    return weighted(outputs, batch)


def regression(outputs, batch):
    """Squared and absolute errors, averaged over an example's targets."""
    errors = outputs - batch["labels"].reshape(outputs.shape)
    squares = jnp.square(errors).mean(axis=1)
    return {"loss": squares, "absolute_error": jnp.abs(errors).mean(axis=1)}


def language_model(outputs, batch):
    """Values [B, T] of tokens; those that the mask leaves out weigh nothing."""
    loss = cross_entropy(outputs, batch["labels"])
    values = {"loss": loss, "bits_per_byte": loss / jnp.log(2.0)}
    if "loss_mask" in batch:
        values["example_weight"] = batch["loss_mask"].astype(jnp.float32)
    return values


def own_loss(outputs, batch):
    """The model's own."""
    loss, scalars = outputs
    values = {"loss": loss, "inner/largest": scalars["inner"]["largest"]}
    return values | {"example_weight": scalars["example_weight"]}


TASKS = {"classification": classification, "regression": regression}
TASKS |= {"language_model": language_model, "own_loss": own_loss}
TASKS |= {"tests.oracle.models:weighted": weighted}
TASKS |= {"tests.oracle.models:per_token": per_token}
# What a kind's data set does on the devices first.
PREPROCESS = {
    "pixels": lambda x: x.astype(jnp.float32) / 255,
    "changed": lambda x: x / 2 - 0.25,  # Small, for float16.
    "stream": lambda x: x.astype(jnp.int32),
    "bytes": lambda x: x.astype(jnp.int32),
}
