"""Whole runs of random configurations against an oracle that knows no template."""

import ast

import pytest

from tests.oracle.compare import differences, disagreements
from tests.oracle.draw import draw
from tests.runs import ROOT

ORACLE = ("plain.py", "models.py", "optimizers.py", "draw.py", "frozen.py", "texts.py")
# What the mends of tests/mends/oracle.toml take out, in one small run.
WEIGHTS = {
    **{"seed": 8788, "kind": "weighted", "devices": 4, "devices_then": 4},
    **{"stops_at": None, "extends": False, "reads": False, "asks_best": False},
    **{"num_train": 24, "num_test": 19, "num_outputs": 3, "bad": None},
    **{"left_out": (), "adapters": None, "trouble": None, "processes": (1, 1)},
    "config": {
        **{"seed": 5, "batch_size": 8, "accumulate_steps": 2, "num_steps": 9},
        **{"model.name": "mlp", "model.width": 8, "model.num_layers": 2},
        **{"task.name": "tests.oracle.models:weighted", "ema_decay": 0.5},
        **{"optimizer.name": "adamw", "optimizer.learning_rate": 1e-3},
        **{"optimizer.schedule": "linear", "optimizer.warmup_steps": 2},
        **{"optimizer.final_fraction": 0.1, "optimizer.weight_decay": 0.1},
        **{"log_every": 1, "eval_every": 3, "steps_per_call": 3},
    },
}
QUICK = {"weights": WEIGHTS}
QUICK |= {str(seed): draw(seed) for seed in (29,)}
# LoRA's dropout, adapters, and steps that are left out; a workdir to start from, and
# what only goes forward; windows of several examples.
KINDS = {"dropped": 10, "ahead": 2, "packed": 7}
QUICK |= {kind: draw(seed, (kind,)) for kind, seed in KINDS.items()}
MORE = range(100, 112)
NAN = float("nan")


@pytest.mark.parametrize("name", ORACLE)
def test_the_oracle_imports_nothing_of_the_template(name):
    allowed = {"fnmatch", "functools", "json", "math", "typing", "tests"}
    allowed |= {"haiku", "jax", "numpy", "optax"}
    for node in ast.walk(ast.parse((ROOT / "tests/oracle" / name).read_text())):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            top = module.partition(".")[0]
            assert top in allowed, module
            assert top != "tests" or module.removeprefix("tests.oracle.") + ".py" in (
                ORACLE
            )


@pytest.mark.parametrize(
    ("value", "right", "count"),
    [(1.6, NAN, 1), (NAN, 1.6, 1), (NAN, NAN, 0), ([NAN, 9.0], [NAN, 1.0], 1)],
)
def test_what_one_says_is_no_number_the_other_must(value, right, count):
    """As the accuracy of a step that is skipped, which was above 1 once."""
    trained, wanted = {"accuracy": value}, {"accuracy": right}
    lines = differences({"config": {}}, {}, trained, wanted, wanted, wanted)
    assert len([*lines]) == count


@pytest.mark.parametrize("name", QUICK)
def test_a_run_agrees_with_the_oracle(name):
    assert disagreements(QUICK[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE)
def test_more_runs_agree_with_the_oracle(seed):
    assert disagreements(draw(seed)) == []
