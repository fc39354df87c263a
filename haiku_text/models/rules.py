"""Rename rules of Hugging Face's layers, as a table."""

from haiku_template.models import Rule

# Of each kind of layer: endings of Hugging Face's names, and of paths. The weight of
# `nn.Linear` is (out, in), that of `Conv1D` (in, out) as Haiku's is; norms of files
# that came from TensorFlow say gamma and beta.
LAYERS = {
    "embedding": {"weight": "embeddings"},
    "linear": {"weight": "w", "bias": "b"},
    "conv1d": {"weight": "w", "bias": "b"},
    "norm": {"weight": "scale", "bias": "offset", "gamma": "scale", "beta": "offset"},
}


def layer_rules(table: str) -> tuple[Rule, ...]:
    """Rename rules of layers, one a line: kind, Hugging Face's name, path.

    `skip` is for tensors that are not parameters; a kind with `?` for optional layers.
    """
    rules: list[Rule] = []
    for kind, name, *path in map(str.split, table.strip().splitlines()):
        if kind == "skip":
            rules.append(Rule(name, None))
            continue
        layer, optional = kind.removesuffix("?"), kind.endswith("?")
        for ending, leaf in LAYERS[layer].items():
            view = "transpose" if (layer, leaf) == ("linear", "w") else "same"
            rules.append(Rule(f"{name}.{ending}", f"{path[0]}/{leaf}", view, optional))
    return tuple(rules)
