"""Text data sets as the documentation says them: files, and the examples in them.

Shapes: N examples, T tokens of the longest input (`context`).
"""

import json

import jax
import numpy as np

STREAMS = ("stream", "bytes")
LINES = ("lines", "packed")
BERT = ("texts", "pairs")
LETTERS = "abcdefghij é\n"


def _text(rng, low, high):
    return "".join(LETTERS[i] for i in rng.integers(len(LETTERS), size=high)[:low])


def draw_texts(rng, kind, n, case):
    """What a file of the kind has: tokens of a stream, text, or rows of a table."""
    if kind == "stream":
        return rng.integers(0, 11, size=6 * n + 1 + rng.integers(6)).astype(np.uint16)
    if kind == "bytes":
        return _text(rng, 6 * n + 2, 6 * n + 2)
    rows = []
    for i in range(n):
        first, second = (_text(rng, rng.integers(1, 6), 6) for _ in range(2))
        if kind == "texts":
            label = f"class {(i * 7) % case['num_outputs']}"
            rows.append({"text": first + second, "label": label})
        else:
            rows.append({"prompt": first if i % 5 else "", "completion": second})
    return rows


def write(path, content):
    """Writes what `draw_texts` gives to a file."""
    if isinstance(content, np.ndarray):
        np.save(path, content)
    elif isinstance(content, str):
        path.write_bytes(content.encode())
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in content))


def examples_of(case, content):
    """Examples of a file: inputs, labels, and perhaps a mask of those that count."""
    kind, context = case["kind"], case["config"]["data.context"]
    if kind == "stream":
        return windows(content, context)
    if kind == "bytes":  # A zero byte ends each part.
        return windows(np.frombuffer(content + b"\0", np.uint8), context)
    if kind == "texts":
        names = sorted({row["label"] for row in content})
        rows = [[*row["text"].encode()][:context] for row in content]
        tokens, mask = padded(rows, context)
        labels = np.array([names.index(row["label"]) for row in content], np.int32)
        inputs = {"tokens": tokens, "mask": mask.astype(np.int32)}
        return {"inputs": inputs, "labels": labels}
    rows, targets, masks = [], [], []
    for row in content:
        prompt, completion = ([*row[x].encode()] for x in ("prompt", "completion"))
        prompt = prompt or [0]  # The end of the text before.
        tokens = prompt + completion + [0]
        counts = [False] * len(prompt) + [True] * (len(completion) + 1)
        tokens, counts = tokens[-context - 1 :], counts[-context - 1 :]
        rows.append(tokens[:-1])
        targets.append(tokens[1:])
        masks.append(counts[1:])
    tokens, labels, mask = (padded(x, context)[0] for x in (rows, targets, masks))
    return {"inputs": tokens, "labels": labels, "loss_mask": mask.astype(bool)}


def sizes_of(case, content):
    """Tokens of each input: all but the last, which is only predicted."""
    text = [(row["prompt"] or "0") + row["completion"] for row in content]
    return [min(len(x.encode()), case["config"]["data.context"]) for x in text]


def length_of(case, contents):
    """The longest length of batches, a multiple of 8 or the context."""
    context = case["config"]["data.context"]
    if case["kind"] == "texts":
        sizes = [len(row["text"].encode()) for x in contents for row in x]
    else:
        sizes = [n for x in contents for n in sizes_of(case, x)]
    return min(-(-max(sizes) // 8) * 8, context)


def windows(tokens, context):
    """Windows that overlap by a token, so that each is predicted once, in order."""
    count = (len(tokens) - 1) // context
    inputs = tokens[: count * context].reshape(count, context)
    labels = tokens[1 : count * context + 1].reshape(count, context)
    return {"inputs": inputs, "labels": labels}


def padded(rows, length):
    """Rows of numbers, with zeros behind; and a mask of the numbers."""
    mask = np.arange(length) < np.array([len(x) for x in rows])[:, None]
    array = np.zeros(mask.shape, np.int32)
    array[mask] = [x for row in rows for x in row]
    return array, mask


def cut(batch, length):
    """A batch without the padding behind a length."""
    return jax.tree.map(lambda x: x if x.ndim == 1 else x[:, :length], batch)


def widened(batch, context):
    """A batch padded further, to the longest inputs."""

    def widen(x):
        x = np.asarray(x)
        if x.ndim == 1:
            return x
        return np.pad(x, ((0, 0), (0, context - x.shape[1])))

    return jax.tree.map(widen, batch)


def unpacked(batch, count):
    """A batch of windows with `count` rows for each, of an example or of none."""
    tokens, segments = batch["inputs"]["tokens"], batch["inputs"]["segments"]
    parts = {"inputs": tokens, "labels": batch["labels"], "loss_mask": segments > 0}
    rows = {name: [] for name in parts}
    for window in range(len(tokens)):
        for number in range(1, count + 1):
            own = segments[window] == number
            for name, x in parts.items():
                row = x[window][own]
                if name == "loss_mask":
                    row = batch["loss_mask"][window][own]
                rows[name].append([*row])
    arrays = {name: padded(x, tokens.shape[1])[0] for name, x in rows.items()}
    return arrays | {"loss_mask": arrays["loss_mask"].astype(bool)}


def as_rows(batch):
    """A row of numbers for each example of a batch."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(batch)]
    leaves = [x.reshape(len(x), -1).astype(np.float64) for x in leaves]
    return np.concatenate(leaves, axis=1)


def pack(sizes, context):
    """First fit, the longest first: how many windows hold the examples."""
    room = []
    for size in sorted(sizes, reverse=True):
        fits = [i for i, x in enumerate(room) if x >= size]
        if not fits:
            fits, room = [len(room)], [*room, context]
        room[fits[0]] -= size
    return len(room)
