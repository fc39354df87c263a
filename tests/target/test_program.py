"""The train step as it is compiled for H100s that are not here.

Tried by hand, each fails with: `attention="xla"` in the config (attention),
`donate_argnums=()` in `Trainer` (donation), the hidden layer of a block's MLP cast to
float32 (products).
"""

import collections
import dataclasses
import json
import re

import haiku as hk
import jax
import numpy as np
import optax
import pytest
from haiku.data_structures import tree_bytes
from safetensors.numpy import save_file

from configs import (
    digits,
    digits_resnet,
    finetune_gpt2_lora,
    finetune_text_classifier,
    gpt2_124m,
    gpt_bytes,
)
from haiku_template import stored
from haiku_template.data import (
    ArrayDataset,
    BatchSpec,
    Data,
    EvaluationSet,
    Split,
    from_split,
)
from haiku_template.devices.layout import device_bytes
from haiku_template.errors import ConfigError
from haiku_template.finetuning import Finetuning, Lora
from haiku_template.models import remat
from haiku_template.preflight.budget import check_budget, memory_budget
from haiku_template.preflight.program import parse, read_program
from haiku_template.preflight.targets import CARDS, target_devices
from haiku_template.reporting.display import in_units
from haiku_template.training import Experiment, regression
from haiku_text.models import gpt as gpt_model
from haiku_text.tasks import language_model
from tests.runs import run_command

pytestmark = pytest.mark.target
GIB = 2**30


@dataclasses.dataclass
class Compiled:
    trainer: object
    budget: object
    text: str
    donated: int

    @property
    def program(self):
        return read_program(self.text)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens.safetensors"
    save_file({"tokens": np.zeros(2_000_000, np.uint16)}, path)
    return str(path)


def gpt2(tokens, **changes):
    config = gpt2_124m.get_config()
    config.data.path, config.data.validation_fraction = tokens, 0.1
    config.data.eval_windows = 64
    config.update_from_flattened_dict(changes)
    return config


def compiled(config, target):
    devices = target_devices(target)
    trainer = Experiment.from_config(config, devices).trainer(devices)
    budget = memory_budget(trainer)
    made = trainer.trace(trainer.feed.host_shapes()[0]).lower().compile()
    donated = made.memory_analysis().alias_size_in_bytes
    return Compiled(trainer, budget, made.as_text(), donated)


def fused(made):
    """Functions of cuDNN's attention that a program calls."""
    computations, _ = parse(made.text)
    calls = {i.target for body in computations.values() for i in body}
    return {name for name in calls if "fmha" in name}


@pytest.fixture(scope="session")
def one_gpt(tokens):
    changes = {"batch_size": 8, "accumulate_steps": 1}
    return compiled(gpt2(tokens, **changes), "h100")


@pytest.fixture(scope="session")
def eight_gpts(tokens):
    return compiled(gpt2(tokens), "h100x8")


@pytest.fixture(params=["one_gpt", "eight_gpts"])
def gpt(request):
    return request.getfixturevalue(request.param)


def test_attention_is_cudnns_in_each_layer_forward_and_backward(gpt):
    layers = 12 * gpt.trainer.experiment.accumulate_steps
    assert gpt.program.attention == (layers, layers)
    # With a mask that is an array, they would have a bias.
    assert fused(gpt) == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}


@pytest.fixture(scope="session")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    rows = [
        {"text": "x" * n, "label": n % 2, "prompt": "x" * n, "completion": "y"}
        for n in range(1, 321)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def of_lines(config, lines, context):
    """Two layers, whatever the preset: each layer has its calls."""
    config.precision, config.batch_size, config.accumulate_steps = "bfloat16", 4, 1
    config.data.update({"path": lines, "tokenizer": None, "context": context})
    config.data.num_buckets, config.finetuning.fresh = 1, ()
    config.finetuning.lora.rank, config.finetuning.lora.patterns = None, ()
    config.finetuning.base_dtype = "float32"
    config.model.update({"remat": False, "num_layers": 2})
    return config


def instructions(made):
    computations, entry = parse(made.text)
    return computations[entry]


def pairs(made, size):
    """Dtypes of arrays of pairs of tokens, and those that kernels of XLA's make.

    A factor of `size` is in no other size of the model.
    """
    computations, entry = parse(made.text)
    found = [
        (dtype, name == entry and i.op != "custom-call")
        for name, body in computations.items()
        for i in body
        for dtype, count in i.shapes
        if count and not count % size**2
        if i.op not in ("bitcast", "get-tuple-element")
    ]
    return {dtype for dtype, _ in found}, [dtype for dtype, is_made in found if is_made]


def test_padding_is_cudnn_s_own_and_no_mask_is_in_the_program(lines):
    """Tried by hand, fails: `attention="xla"`."""
    config = of_lines(finetune_text_classifier.get_config(), lines, 320)
    bert = compiled(config, "h100")
    assert bert.trainer.feed.host_shapes()[0]["inputs"]["tokens"].shape == (4, 320)
    assert bert.program.attention == (2, 2)
    assert fused(bert) == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert pairs(bert, 320) == (set(), [])


def test_packed_windows_have_one_mask_for_all_layers_and_heads(lines):
    config = of_lines(finetune_gpt2_lora.get_config(), lines, 640)
    config.data.packing = True
    gpt = compiled(config, "h100")
    assert gpt.program.attention == (2, 2)
    biased = {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}
    assert fused(gpt) == biased
    # jax 0.10 has cuDNN write a gradient of it, too, which is thrown away.
    assert pairs(gpt, 640)[1] == ["bf16"]


def test_all_products_are_of_bfloat16(gpt):
    assert gpt.program.products
    assert all(name.startswith("bf16 x bf16") for name in gpt.program.products)


def test_the_state_is_donated_whole_and_not_copied(gpt):
    size = tree_bytes(gpt.trainer.abstract.without_frozen())
    assert gpt.donated >= size
    computations, entry = parse(gpt.text)
    copied = sum(
        4 * number
        for i in computations[entry]
        if i.op in ("copy", "copy-start")
        for dtype, number in i.shapes[:1]
        if dtype == "f32"  # Activations are bfloat16.
    )
    assert copied < 0.02 * size


def test_nothing_goes_to_the_host(gpt):
    assert gpt.program.host_copies == 0


def test_gradients_are_reduced_once(eight_gpts):
    size = tree_bytes(eight_gpts.trainer.abstract.params)
    assert size <= sum(eight_gpts.program.all_reduces) < 1.01 * size


def test_half_precision_sends_half_the_bytes_in_one_more_all_reduce():
    """Scalars stay float32 and are apart; without it there is one for both."""
    found = []
    for dtype in (None, "bfloat16"):
        config = digits.get_config()
        config.reduce_dtype = dtype
        made = compiled(config, "h100x8")
        found.append(sorted(made.program.all_reduces))
    gradients, scalars = tree_bytes(made.trainer.abstract.params), 2 * 4
    assert found == [[gradients + scalars], [scalars, gradients // 2]]


def test_budgets_are_what_they_were(one_gpt, eight_gpts):
    assert one_gpt.budget.peak == pytest.approx(6.0 * GIB, rel=0.1)
    assert eight_gpts.budget.peak == pytest.approx(9.4 * GIB, rel=0.1)


def test_a_run_that_does_not_fit_is_told_what_does(tokens):
    changes = {"batch_size": 64, "accumulate_steps": 1, "model.attention": "xla"}
    devices = target_devices("h100")
    trainer = Experiment.from_config(gpt2(tokens, **changes), devices).trainer(devices)
    with pytest.raises(ConfigError, match="accumulate_steps=2 would fit with 4"):
        check_budget(trainer)


def test_half_precision_is_compiled_for_cards_that_have_no_bfloat16():
    """XLA alone would end: JAX asks for products of bfloat16, added up in float32."""
    config = gpt_bytes.get_config()
    config.precision, config.model.num_layers = "bfloat16", 1
    products = compiled(config, "t4").program.products
    assert set(products) == {"f32 x f32 to f32"}


SHARDED = {"model.num_layers": 4, "model.remat": True, "sharding": (("*", "data"),)}
SHARDED |= {"batch_size": 16, "accumulate_steps": 1}
WIDTH = 768


VIEWS = ("bitcast", "opt-barrier", "get-tuple-element")


def spans(body):
    """Arrays of a run: who makes them, their elements, first and last place in it."""
    places = {i.name: n for n, i in enumerate(body)}
    users = collections.defaultdict(list)
    for i in body:
        for name in i.operands:
            users[name].append(i)

    def last(array):
        return max(
            [places[array.name]]
            + [last(i) if i.op in VIEWS else places[i.name] for i in users[array.name]]
        )

    for i in body:
        parts = [x for x in users[i.name] if x.op == "get-tuple-element"]
        for array in parts or [i] * (i.op not in VIEWS):
            yield i.op, array.shapes[-1][1], places[i.name], last(array)


@pytest.fixture(scope="session")
def sharded_gpt(tokens):
    return compiled(gpt2(tokens, **SHARDED), "h100x8")


def test_a_block_is_gathered_in_each_pass_and_its_gradient_is_scattered_once(
    sharded_gpt,
):
    """As XLA combines them; matrices of no more than two blocks are whole at a time."""
    made, gathers = sharded_gpt, ("all-gather", "all-gather-done")
    matrices = [WIDTH * WIDTH * n for n in (1, 3, 4, 4)]
    gathered = [x for op, *x in spans(instructions(made)) if op in gathers]
    gathered = [x for x in gathered if x[0] in matrices]
    counts = collections.Counter(size for size, *_ in gathered)
    assert counts == {k: 2 * 4 * matrices.count(k) for k in matrices}
    alive = [sum(n for n, a, b in gathered if a <= k <= b) for _, k, _ in gathered]
    assert max(alive) <= 2 * sum(matrices)
    scatters = [
        i for i in instructions(made) if re.match("reduce-scatter(-start)?$", i.op)
    ]
    blocks = 4 * len(matrices)
    assert sum(len(i.operands) for i in scatters) == blocks + 2  # Tokens and positions.
    assert sum(made.program.all_reduces) < 4 * min(matrices)  # Of vectors alone.


def test_what_a_block_computed_again_is_gone_before_the_next_one_does(sharded_gpt):
    """Without an order of gradients, inputs of all four blocks wait for them."""
    hidden = 4 * WIDTH * 2 * 1024  # Of an MLP, in a device's two windows.
    body = instructions(sharded_gpt)
    alive = [(a, b) for _, size, a, b in spans(body) if size == hidden]
    assert len(alive) >= 4
    assert max(sum(a <= k <= b for a, b in alive) for k, _ in alive) <= 4


def test_gpt2_1558m_is_refused_by_eight_cards_of_24_gb_and_their_shares_fit(tokens):
    """By the state alone; the whole program, of minutes, is in docs/fit.md."""
    changes = {"model.preset": "1558M", "model.remat": True}
    changes |= {"batch_size": 64, "accumulate_steps": 1}
    devices = target_devices("rtx4090x8")
    whole, shares = (
        Experiment.from_config(gpt2(tokens, **changes, **rules), devices)
        for rules in ({}, {"sharding": (("*", "data"),)})
    )
    with pytest.raises(ConfigError, match="is 17.41 GiB on each device .* 16.76 GiB"):
        check_budget(whole.trainer(devices))
    state = shares.trainer(devices).abstract
    assert device_bytes(state) == pytest.approx(tree_bytes(state) / 8, rel=1e-3)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "preset, cards, windows, most",
    [("355M", "h100x8", 32, 2.3), ("1558M", "rtx4090x8", 64, 6)],
)
def test_shares_of_a_published_size_fit_as_compiled(
    tokens, preset, cards, windows, most
):
    """GiB on each card; 72 s of a processor, and some minutes, for XLA's plan."""
    changes = SHARDED | {"model.preset": preset, "batch_size": windows}
    del changes["model.num_layers"]
    devices = target_devices(cards)
    trainer = Experiment.from_config(gpt2(tokens, **changes), devices).trainer(devices)
    budget = memory_budget(trainer)
    assert device_bytes(trainer.abstract) < budget.peak < most * GIB


def test_a_lora_step_has_one_layer_s_adapted_matrices_at_a_time(monkeypatch):
    """Merged before `apply`, as they were once, those of all layers exist together."""
    layers, width = 24, 256
    sizes = {"width": width, "num_layers": layers, "num_heads": 4, "context": 128}
    tokens = np.zeros((4, 128), np.int32)
    batches, spec = EvaluationSet(tokens, tokens, 4), BatchSpec(4)
    data = Data(ArrayDataset(tokens, tokens, spec), batches, 64)
    lora = Lora(rank=4, patterns=("*/qkv/w", "*/projection/w", "*/up/w", "*/down/w"))

    def merging(apply, dtype, in_order):
        return lambda params, *args: apply(stored.used(params, dtype), *args)

    temporaries = []
    for using in (stored.using, merging):
        monkeypatch.setattr(stored, "using", using)
        trainer = Experiment(
            model=gpt_model(
                num_outputs=64, axis_name=None, dropout=0.0, remat=True, **sizes
            ),
            task=language_model,
            data=data,
            optimizer=optax.adam(1e-3),
            finetuning=Finetuning(lora=lora),
        ).trainer(target_devices("h100"))
        made = trainer.trace(trainer.feed.host_shapes()[0]).lower().compile()
        temporaries.append(made.memory_analysis().temp_size_in_bytes)
    of_a_layer = 4 * (3 + 1 + 4 + 4) * width**2
    # XLA of jax 0.12 has a copy of up's and down's beside those of a layer.
    alive = 1 if jax.__version_info__ < (0, 11) else 2
    assert temporaries[1] - temporaries[0] >= (layers - alive) * of_a_layer


class Block(hk.Module):
    def __call__(self, x):
        return x + hk.Linear(256)(jax.nn.gelu(hk.Linear(2048)(x)))


def test_blocks_of_any_model_are_rematerialized_and_suggested():
    def forward(x):
        for i in range(12):
            x = Block(name=f"block_{i}")(x)
        return hk.Linear(1)(x)

    x = np.zeros((8192, 256), np.float32)
    data = from_split(Split(x, x[:, 0], x, x[:, 0]), BatchSpec(8192, labels="numbers"))
    model, parts = hk.transform(forward), {"task": regression, "data": data}
    parts |= {"optimizer": optax.adam(1e-3)}
    devices = target_devices("h100")
    trainer, again = (
        Experiment(model=made, **parts).trainer(devices)
        for made in (model, remat(model, ("block_*",)))
    )
    plain, smaller = memory_budget(trainer), memory_budget(again)
    assert smaller.temporaries < plain.temporaries / 2
    size = in_units(smaller.peak)
    with pytest.raises(ConfigError, match=rf"fits with remat of block_\*, {size} and"):
        check_budget(trainer, plain.peak - plain.temporaries // 2)


def test_a_convolutional_net_compiles_for_one_and_for_eight():
    for target in ("h100", "h100x8"):
        made = compiled(digits_resnet.get_config(), target)
        assert made.program.host_copies == 0
        assert made.budget.peak < GIB
        assert bool(made.program.all_reduces) == (target == "h100x8")


@pytest.mark.parametrize("card", CARDS)
def test_every_card_is_known_to_xla(card):
    devices = target_devices(card, memory_fraction=0.5)
    assert devices.memory_limit() == CARDS[card].gigabytes * 10**9 // 2
    product = devices.compile(lambda x, batch: (x @ batch, batch), donate_argnums=())
    x = devices.abstract(lambda: np.zeros((64, 64), np.float32))
    compiled = product.trace(x, x).lower().compile()
    assert compiled.memory_analysis().argument_size_in_bytes


def test_unified_memory_is_the_card_s_and_as_much_of_the_host_s(tmp_path):
    devices = target_devices("l4", gpu_memory="unified:2.0")
    assert devices.memory_limit() == 48 * 10**9
    assert devices.card_memory() == 24 * 10**9
    flags = ["--config=configs/digits.py", f"--workdir={tmp_path}", "--dry_run"]
    done = run_command("train", *flags, "--target=l4", "--gpu_memory=unified:2.0")
    assert done.returncode == 0, done.stderr
    assert "44.70 GiB" in done.stdout and "22.35 GiB" in done.stdout
    assert "speed of the bus" not in done.stdout  # It fits the card.


def test_several_cards_are_a_row_each(tmp_path):
    flags = ["--config=configs/digits.py", "--dry_run", "--target=t4,h100x2"]
    done = run_command("train", *flags)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "GiB" in line]
    assert [line[1] for line in lines] == ["t4", "h100x2"]
    assert all("yes" in line for line in lines)
    assert [line[line.index("GiB") - 1] for line in lines] == ["11.18", "55.88"]
    small = run_command("train", *flags, "--device_memory_limit=1MiB")
    assert small.stdout.count(" no ") == 2, small.stderr
    wrong = run_command("train", *flags[:-1], "--target=t4,h1000")
    assert wrong.returncode == 64 and "nearest is h100" in wrong.stderr


def test_a_card_in_a_file_is_compiled_for(tmp_path):
    from haiku_template.preflight.targets import _spec

    file = tmp_path / "card.txtpb"
    file.write_text(_spec(CARDS["h200"]))
    devices = target_devices(f"{file}x2")
    assert devices.num_devices == 2 and devices.memory_limit() == 105_750_000_000
