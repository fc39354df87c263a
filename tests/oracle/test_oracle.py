"""Whole runs of random configurations against an oracle that knows no template."""

import ast

import pytest

from tests.oracle.compare import disagreements
from tests.oracle.draw import draw
from tests.runs import ROOT

ORACLE = ("plain.py", "models.py", "optimizers.py", "draw.py")
QUICK = (8788, 29)
MORE = range(100, 112)


@pytest.mark.parametrize("name", ORACLE)
def test_the_oracle_imports_nothing_of_the_template(name):
    allowed = {"fnmatch", "math", "typing", "haiku", "jax", "numpy", "optax", "tests"}
    for node in ast.walk(ast.parse((ROOT / "tests/oracle" / name).read_text())):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            top = module.partition(".")[0]
            assert top in allowed, module
            assert top != "tests" or module.removeprefix("tests.oracle.") + ".py" in (
                ORACLE
            )


def test_the_case_of_the_mends_has_what_they_take_out():
    """Another way to draw makes another case of a seed: see tests/mends/oracle.toml."""
    case = draw(QUICK[0])
    config = case["config"]
    assert case["kind"] == "weighted" and case["devices"] == 4
    assert config["accumulate_steps"] > 1 and case["num_test"] % config["batch_size"]
    keys = ("ema_decay", "optimizer.weight_decay", "optimizer.warmup_steps")
    assert all(config[key] for key in keys)
    assert config["optimizer.schedule"] == "linear"


@pytest.mark.parametrize("seed", QUICK)
def test_a_run_agrees_with_the_oracle(seed):
    assert disagreements(draw(seed)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE)
def test_more_runs_agree_with_the_oracle(seed):
    assert disagreements(draw(seed)) == []
