"""Generation from a checkpoint, against the plain forward pass over the same tokens."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from words import CONTEXT, TEXT, make_config

from haiku_template.config import default_config, to_dict
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.runs import Run, start
from haiku_template.storage.checkpoint import Checkpoints
from haiku_template.training import Experiment
from haiku_text.generation import Sampling, load, make_generate
from haiku_text.models import multiply_out

DEVICES = DeviceManager.create("cpu", num_devices=1)
GREEDY = Sampling(temperature=0.0)
APPLY = {}
GENERATE = {}  # By model and sampling, so that each compiles once.


@pytest.fixture(scope="module")
def model(trained):
    config, workdir = trained
    return load(Run.open(workdir, DEVICES, "latest"))


def written(model, prompts, num_tokens, sampling=GREEDY):
    """The tokens written for each prompt: lists."""
    prompts = [list(prompt.encode()) for prompt in prompts]
    key = id(model), sampling
    if key not in GENERATE:
        GENERATE[key] = make_generate(DEVICES, model, sampling)
    with DEVICES.explicit_transfers():
        steps = list(GENERATE[key](prompts, num_tokens))
    return np.stack(steps, axis=1).tolist()


def likeliest(model, prompt, num_tokens):
    """The same for one prompt at temperature 0, by the whole forward pass each time."""
    apply = APPLY.setdefault(id(model), jax.jit(model.model.apply, static_argnums=3))
    window, tokens = list(prompt.encode())[-model.context :], []
    for _ in range(num_tokens):
        if len(window) > model.context:
            window = window[-(model.context // 2) :]
        padded = np.zeros((1, model.context), np.int32)
        padded[0, : len(window)] = window
        logits = multiply_out(apply(model.params, None, padded, False))
        token = int(np.argmax(logits[0, len(window) - 1]))
        window.append(token)
        tokens.append(token)
    return tokens


def test_the_model_is_that_of_the_checkpoint(trained, model):
    config, workdir = trained
    trainer = Experiment.from_config(config, DEVICES).trainer(DEVICES)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        saved = checkpoints.restore(100, trainer.abstract.saved())
    assert (model.step, model.vocabulary, model.context) == (100, 256, CONTEXT)
    jax.tree.map(np.testing.assert_array_equal, model.params, saved["ema_params"])
    moved = jax.tree.map(lambda a, b: np.any(a != b), model.params, saved["params"])
    assert any(jax.tree.leaves(moved))
    DEVICES.check(model.params)


@pytest.mark.slow(but="24-60")
@pytest.mark.parametrize("num_tokens", [1, 10, 60])
@pytest.mark.parametrize("length", [1, 10, CONTEXT, CONTEXT + 9])
def test_greedy_is_the_likeliest_token_each_time(model, length, num_tokens):
    prompt = TEXT.replace("é", "e")[:length]
    (tokens,) = written(model, [prompt], num_tokens)
    assert tokens == likeliest(model, prompt, num_tokens)


def test_what_was_learnt_comes_back(model):
    (tokens,) = written(model, ["my dog"], 80)
    expected = TEXT.removeprefix("my dog").encode()[:80]
    assert bytes(tokens) == expected


def test_each_of_several_prompts_goes_on_as_it_would_alone(model):
    # They fill the context at different times.
    prompts = ["my dog ran of", "t", "off to a cafe by night. my", "zq#"]
    together = written(model, prompts, 40)
    assert together == [written(model, [prompt], 40)[0] for prompt in prompts]
    assert len({tuple(tokens) for tokens in together}) > 1


@pytest.mark.slow
def test_the_same_seed_writes_the_same_and_another_does_not(model):
    def bold(seed, prompts=("my",)):
        return written(model, prompts, 30, Sampling(temperature=3.0, seed=seed))

    assert bold(0) == bold(0) != bold(1)
    first, second = bold(0, ("my", "my"))
    assert [first] == bold(0) and first != second


def test_one_compilation_reads_and_one_writes(model):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, fun_name="", **__: (
            compiled.append(fun_name) if "backend_compile" in name else None
        )
    )
    generate = make_generate(DEVICES, model, Sampling(temperature=0.7, top_k=5))
    for prompt in (b"my", b"my dog ran off", b"a"):  # All are padded to 16.
        assert len(list(generate([list(prompt)], 8))) == 8
    assert compiled.count("jit(prefill)") == compiled.count("jit(decode)") == 1
    assert len(compiled) == 2
    compiled.clear()
    generate = make_generate(DEVICES, model, GREEDY)
    assert len(list(generate([list(b"my dog")], 70))) == 70  # The context many times.
    assert sorted(compiled) == ["jit(decode)", "jit(prefill)"]


def test_bfloat16_writes_the_same(trained):
    _, workdir = trained
    run = Run.open(workdir, DEVICES, "latest")
    run.config.precision = "bfloat16"
    model = load(run)
    assert model.params["gpt/embed"]["embeddings"].dtype == jnp.bfloat16
    (tokens,) = written(model, ["my dog"], 30)
    assert bytes(tokens) == TEXT.removeprefix("my dog").encode()[:30]


def test_a_prompt_longer_than_the_context_is_said_to_be_cut(model, caplog):
    written(model, ["x" * 30], 1)
    assert "a prompt has 30 tokens and the model sees 24 at once" in caplog.text


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(temperature=-1.0), r"--temperature=-1\.0; possible is 0 or more"),
        (Sampling(temperature=float("nan")), "--temperature=nan"),
        (Sampling(seed=-1), r"--seed=-1; possible is 0 to 2\*\*32 - 1"),
        (Sampling(seed=2**32 + 1), "--seed=4294967297; possible is"),
        (Sampling(top_k=0), "--top_k=0; possible is 1 to 256"),
        (Sampling(top_k=257), "--top_k=257; possible is 1 to 256"),
        (Sampling(top_k=100, vocabulary=99), "--top_k=100; possible is 1 to 99"),
        (Sampling(vocabulary=300), "the tokenizer has 300 tokens and the model 256"),
    ],
)
def test_settings_that_do_not_fit_are_refused(model, sampling, words):
    with pytest.raises(ConfigError, match=words) as error:
        make_generate(DEVICES, model, sampling)
    assert error.value.exit_code == 64


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "a prompt has no tokens"),
        (np.array([], int), "a prompt has no tokens"),
        (np.array([3, 256]), "token 1 of the prompt is 256, and the model has 256"),
        ([3, 256], "token 1 of the prompt is 256, and the model has 256 tokens"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(model, prompt, words):
    with pytest.raises(ConfigError, match=words):
        make_generate(DEVICES, model, GREEDY)([prompt], 5)


def test_prompts_may_be_arrays_and_are_one_at_least(model):
    expected = written(model, ["\0", "my"], 2)
    generate = GENERATE[id(model), GREEDY]
    for prompts in ([np.array([0]), np.array([109, 121])], [[0], [109, 121]]):
        with DEVICES.explicit_transfers():
            tokens = np.stack([*generate(prompts, 2)], axis=1)
        assert tokens.tolist() == expected
    for prompts in ([], np.zeros((0, 3), int)):
        with pytest.raises(ConfigError, match="there is no prompt; a model continues"):
            generate(prompts, 2)


def test_a_model_of_another_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_dict(default_config())))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        params = {"mlp/~/linear_0": {"w": jnp.zeros((3, 2))}}
        checkpoints.save(1, {"params": params}, None)
    with pytest.raises(ConfigError, match="model.name=mlp .* gpt is"):
        load(Run.open(tmp_path, DEVICES, "latest"))


def test_a_checkpoint_of_another_model_or_none_is_refused(
    trained, four_devices, tmp_path
):
    _, workdir = trained
    with pytest.raises(ConfigError, match="--checkpoint=7 .* there are steps .*100"):
        load(Run.open(workdir, DEVICES, "7"))
    with pytest.raises(ConfigError, match="on one device, and 4 were asked for"):
        load(Run.open(workdir, four_devices, "latest"))
    with pytest.raises(ConfigError, match="is not the workdir of a run"):
        load(Run.open(workdir.parent, DEVICES, "latest"))
    with pytest.raises(ConfigError, match="config.json is not the workdir of a run"):
        Run.open(workdir / "config.json", DEVICES)
    shutil.copy(workdir / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="holds no checkpoints$"):
        load(Run.open(tmp_path, DEVICES, "latest"))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="no checkpoints.*config.init_from=FOLDER"):
        load(Run.open(tmp_path, DEVICES, "latest"))


@pytest.mark.slow
def test_a_fine_tuned_run_writes_with_its_adapters_merged(trained, tmp_path):
    config, base = trained
    tuned = make_config(num_steps=5, ema_decay=None, init_from=str(base))
    tuned.finetuning.lora.rank = 2
    start.run(tuned, DEVICES, str(tmp_path / "run"))
    model = load(Run.open(tmp_path / "run", DEVICES, "latest"))
    plain = load(Run.open(base, DEVICES, "best"))
    same = jax.tree.map(lambda x, y: bool((x == y).all()), model.params, plain.params)
    assert not all(jax.tree.leaves(same)), "the adapters changed nothing"
    assert all(jax.tree.leaves(same["gpt/embed"]))
    assert written(model, ["the "], 5) == [likeliest(model, "the ", 5)]
