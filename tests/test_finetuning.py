"""Hugging Face folders through the shipped configs: train, evaluate, generate, export.

The folders are small ones with random weights, written in Hugging Face's layout.
"""

import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from configs import finetune_gpt2_lora, finetune_text_classifier
from haiku_template import config as configs
from haiku_template import runs
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.params import flatten
from haiku_template.runs import Run
from haiku_template.runs.start import run
from haiku_template.storage.workdir import has_checkpoints
from haiku_template.training import Experiment
from haiku_text import generation
from haiku_text import models as text_models
from haiku_text.data import Tokenizer
from haiku_text.huggingface import export_new, to_config
from tests.runs import evaluated

ADJECTIVES = {"good": ["fine", "bright", "warm"], "bad": ["dull", "cold", "weak"]}
NOUNS = ["film", "book", "song", "play"]
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo"}
SIZES = {"width": 32, "num_layers": 2, "num_heads": 2, "context": 64}


@pytest.fixture(scope="module")
def cpu():
    return DeviceManager.create("cpu", num_devices=1)


def write_folder(folder, kind, texts, devices, seed=0):
    """A Hugging Face folder of a small model with random weights, and a tokenizer."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"] if kind == "gpt2" else []
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary = tokenizer.get_vocab_size()
    make = {"bert": text_models.bert, "gpt2": text_models.gpt}[kind]
    size = "num_outputs"
    arguments = SIZES | {"dropout": 0.0}
    if kind == "bert":
        size = "vocab_size"
        arguments |= {"mlp_width": 64}
    arguments |= {size: vocabulary}
    model = make(**{"num_outputs": None} | arguments)
    tokens = np.zeros((1, 4), np.int32)
    inputs = {"tokens": tokens, "mask": tokens} if kind == "bert" else tokens
    params = devices.init(lambda: model.init(jax.random.key(seed), inputs, False))
    config = to_config(make.family, arguments)
    export_new(folder, params, make.family.rules, devices, config=config)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def bert(cpu, tmp_path_factory):
    """A folder of a BERT, and texts with labels that one word tells apart."""
    home = tmp_path_factory.mktemp("bert")
    lines = [
        {"text": f"This {noun} number {i} is {adjective}.", "label": label}
        for label, adjectives in ADJECTIVES.items()
        for adjective in adjectives
        for noun in NOUNS
        for i in range(8)
    ]
    path = write_lines(home / "texts.jsonl", lines)
    texts = [line["text"] for line in lines]
    return write_folder(home / "bert", "bert", texts, cpu), path


@pytest.fixture(scope="module")
def gpt2(cpu, tmp_path_factory):
    """A folder of a GPT-2, and questions with answers."""
    home = tmp_path_factory.mktemp("gpt2")
    lines = [
        {"prompt": f"{i}. The capital of {country} is", "completion": f" {city}."}
        for country, city in CAPITALS.items()
        for i in range(16)
    ]
    path = write_lines(home / "answers.jsonl", lines)
    texts = [line["prompt"] + line["completion"] for line in lines]
    return write_folder(home / "gpt2", "gpt2", texts, cpu), path


def classifier(folder, path, **changes):
    return changed(
        finetune_text_classifier.get_config(),
        {"init_from": str(folder), "data.path": str(path), "num_steps": 60},
        {"eval_every": 30, "save_every": 30},
        {"optimizer.learning_rate": 3e-3, "optimizer.warmup_steps": 0},
        changes,
    )


def answers(folder, path, **changes):
    return changed(
        finetune_gpt2_lora.get_config(),
        {"init_from": str(folder), "data.path": str(path), "num_steps": 80},
        {"eval_every": 40, "save_every": 40, "data.context": 64},
        {"batch_size": 16, "accumulate_steps": 2, "precision": "float32"},
        # Adapters of random weights have nothing to build on.
        {"finetuning.train": ("gpt/embed/*",)},
        {"optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 0},
        changes,
    )


def changed(config, *changes):
    for values in changes:
        config.update_from_flattened_dict(values)
    configs.check(config)
    return config


@pytest.fixture(scope="module")
def answering(cpu, gpt2, tmp_path_factory):
    """The workdir of a run with adapters, and its folder of adapters alone."""
    home = tmp_path_factory.mktemp("answering")
    config = answers(*gpt2)
    run(config, cpu, str(home / "run"))
    runs.export_adapters(
        Run.open(home / "run", cpu, "latest"), home / "exported" / "adapters"
    )
    return home / "run", home / "exported" / "adapters"


@pytest.mark.slow
def test_a_bert_folder_becomes_a_classifier(tmp_path, cpu, bert):
    folder, path = bert
    config = classifier(folder, path, **{"model.pooling": "cls"})
    workdir = tmp_path / "run"
    run(config, cpu, str(workdir))
    saved = configs.of_run(workdir)
    assert saved.data.tokenizer == str(folder)
    _, metrics = evaluated(workdir, cpu, "best")
    assert metrics["eval/accuracy"] > 0.9 and metrics["eval/macro_f1"] > 0.9
    assert (workdir / "confusion.png").stat().st_size > 1000

    runs.export_safetensors(Run.open(workdir, cpu, "latest"), tmp_path / "out")
    before, after = (
        load_file(where / "model.safetensors") for where in (folder, tmp_path / "out")
    )
    assert after.keys() - before.keys() == {"classifier.weight", "classifier.bias"}
    assert not before.keys() - after.keys()
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["label2id"] == {"bad": 0, "good": 1}
    runs.export_stablehlo(Run.open(workdir, cpu, "latest"), tmp_path / "program")
    with pytest.raises(ConfigError, match="trained a whole model, and --format=adap"):
        runs.export_adapters(Run.open(workdir, cpu, "latest"), tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()

    # What was exported starts another run where this one ended.
    again = classifier(
        tmp_path / "out", path, **{"finetuning.fresh": (), "model.pooling": "cls"}
    )
    first, second = (
        Experiment.from_config(again, cpu).trainer(cpu).init().params,
        Run.open(workdir, cpu, "latest").state.params,
    )
    for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_head_alone_trains_on_a_frozen_encoder(tmp_path, four_devices, bert):
    config = classifier(*bert, num_steps=2, **{"finetuning.train": ("bert/head/*",)})
    config.model.remat = True
    run(config, four_devices, str(tmp_path))
    state = Run.open(tmp_path, four_devices, "latest").state
    assert set(state.params) == {"bert/head"}
    assert set(state.frozen) >= {"bert/embed", "bert/block_0/mlp/up"}


@pytest.mark.slow
def test_a_gpt_2_folder_learns_answers(cpu, gpt2, answering):
    folder, _ = gpt2
    workdir, _ = answering
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    losses = [x["eval/loss"] for x in map(json.loads, lines) if "eval/loss" in x]
    assert losses[-1] < 0.1 * np.log(256)
    saved = configs.of_run(workdir)
    assert completed(saved, cpu, workdir) == " Rome."
    _, metrics = evaluated(workdir, cpu, "latest")
    assert metrics["eval/loss"] == pytest.approx(losses[-1], abs=1e-6)
    frozen = Run.open(workdir, cpu, "latest").state.frozen
    assert {str(x.dtype) for x in jax.tree.leaves(frozen)} == {"bfloat16"}


def completed(saved, devices, workdir, prompt="3. The capital of Italy is"):
    """What a run writes behind a prompt, to the end of the text."""
    tokenizer = Tokenizer(saved.data.tokenizer)
    model = generation.load(Run.open(workdir, devices, "latest"))
    sampling = generation.Sampling(temperature=0.0, vocabulary=tokenizer.size)
    generate = generation.make_generate(devices, model, sampling)
    stream, (tokens,) = tokenizer.stream(), tokenizer.encode([prompt])
    for token in tokens:
        stream(token)
    new = [int(row[0]) for row in generate([tokens], 8)]
    assert tokenizer.end in new
    return "".join(map(stream, new[: new.index(tokenizer.end)]))


@pytest.mark.slow
def test_what_was_merged_answers_as_the_adapters_do(tmp_path, cpu, gpt2, answering):
    workdir, _ = answering
    out = tmp_path / "merged"
    runs.export_safetensors(Run.open(workdir, cpu, "latest"), out)
    before, after = (load_file(x / "model.safetensors") for x in (gpt2[0], out))
    assert before.keys() == after.keys()
    assert (out / "tokenizer.json").is_file()
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert any("c_attn.weight" in name for name in moved)
    alone = {"finetuning.lora.rank": None, "finetuning.lora.patterns": ()}
    whole = answers(out, gpt2[1], **alone)
    whole.finetuning.base_dtype = "float32"
    found = Experiment.from_config(whole, cpu).trainer(cpu)
    loss = found.evaluate(found.init())["eval/loss"]
    _, metrics = evaluated(workdir, cpu, "latest")
    assert loss == pytest.approx(metrics["eval/loss"], abs=0.02)  # A bfloat16 base.


@pytest.mark.slow
def test_adapters_alone_are_small_and_stand_for_the_run(cpu, answering):
    workdir, adapters = answering
    assert sorted(p.name for p in adapters.iterdir()) == [
        "adapters.safetensors",
        "config.json",
    ]
    saved = configs.of_run(adapters)
    assert configs.to_dict(saved) == configs.to_dict(configs.of_run(workdir))
    assert evaluated(adapters, cpu, "latest") == evaluated(workdir, cpu, "latest")
    assert completed(saved, cpu, adapters) == " Rome."
    with pytest.raises(ConfigError, match=r"--checkpoint=7 .* are of step 80"):
        evaluated(adapters, cpu, "7")


@pytest.mark.slow
def test_training_goes_on_from_adapters(tmp_path, cpu, gpt2, answering):
    workdir, adapters = answering
    config = answers(*gpt2, num_steps=1, **{"optimizer.learning_rate": 0.0})
    config.finetuning.adapters = str(adapters)
    run(config, cpu, str(tmp_path / "more"))
    expected = evaluated(workdir, cpu, "latest")[1]
    found = evaluated(tmp_path / "more", cpu, "latest")[1]
    assert found == expected


@pytest.mark.slow
def test_adapters_that_do_not_fit_are_refused(tmp_path, cpu, gpt2, answering):
    _, adapters = answering
    text = ["The capital of Norway is Oslo."]
    other = write_folder(tmp_path / "other", "gpt2", text, cpu, seed=1)
    for folder, changes, words in (
        (gpt2[0], {"finetuning.lora.rank": 4}, "have rank 8"),
        (
            gpt2[0],
            {"finetuning.base_dtype": "float32"},
            "trained with other frozen parameters",
        ),
        (other, {"data.vocab_size": None}, "trained with other frozen parameters"),
    ):
        changes = {"finetuning.adapters": str(adapters)} | changes
        config = answers(folder, gpt2[1], **changes)
        with pytest.raises(ConfigError, match=words):
            Experiment.from_config(config, cpu).trainer(cpu).init()
    with pytest.raises(ConfigError, match=words):
        run(config, cpu, str(tmp_path / "run"))
    assert not has_checkpoints(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds adapters and no whole model"):
        Experiment.from_config(answers(adapters, gpt2[1]), cpu).trainer(cpu)


@pytest.mark.slow
def test_the_commands_take_adapters_for_a_run(tmp_path, command, answering):
    workdir, _ = answering
    out = tmp_path / "adapters"
    flags = (f"--workdir={workdir}", "--format=adapters", f"--output={out}")
    done = command("export", *flags)
    assert done.returncode == 0, done.stderr
    assert f"{out}: step 80 of {workdir}" in done.stdout
    asked = ("--prompt=5. The capital of Norway is", "--num_tokens=3")
    done = command("generate", f"--workdir={out}", "--temperature=0", *asked)
    assert done.returncode == 0, done.stderr
    assert "The capital of Norway is Oslo" in done.stdout
    (out / "adapters.safetensors").write_bytes(b"cut")
    done = command("evaluate", f"--workdir={out}")
    assert done.returncode == 64, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "truncated" in done.stderr


def test_texts_longer_than_the_positions_and_other_mistakes_name_their_keys(
    tmp_path, cpu, bert, gpt2
):
    folder, path = bert
    long = [{"text": f"{i} " * 90, "label": i % 2} for i in range(40)]
    long = write_lines(tmp_path / "long.jsonl", long)
    odd = write_lines(tmp_path / "odd.jsonl", [{"text": "so so", "label": "odd"}])
    for config, error, words in (
        (
            classifier(folder, long),
            ConfigError,
            r"data\.context=64 and data\.trunc",
        ),
        (
            classifier(folder, path, **{"data.validation_path": str(odd)}),
            ConfigError,
            "line 1 of .*odd.jsonl has the label 'odd', which no example to train on",
        ),
        (classifier(gpt2[0], path), ConfigError, "of type 'gpt2'; possible are be"),
        (classifier("nowhere", path), ConfigError, "init_from=nowhere is not there"),
        (classifier("", path), ConfigError, "init_from= is not there"),
        (
            classifier(folder, path, init_from=None),
            ConfigError,
            "config.finetuning.fresh needs --config.init_from",
        ),
        (
            answers(gpt2[0], path),
            ConfigError,
            "kind for config.task.name=classification",
        ),
    ):
        with pytest.raises(error, match=words):
            run(config, cpu, str(tmp_path / "run"))
        assert not (tmp_path / "run").exists()


def test_a_folder_says_how_many_tokens_its_model_has(tmp_path, cpu, gpt2):
    folder, path = gpt2
    config = answers(folder, path, **{"data.tokenizer": None})  # 256 bytes.
    abstract = Experiment.from_config(config, cpu).trainer(cpu).abstract
    assert abstract.frozen["gpt/positions"]["embeddings"].shape == (64, 32)
    assert len(abstract.params["gpt/embed"]["embeddings"]) == 300


@pytest.mark.slow
def test_what_was_exported_is_no_place_for_a_run(tmp_path, cpu, gpt2, answering):
    workdir, adapters = answering
    exported = tmp_path / "exported"
    shutil.copytree(adapters, exported)
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    with pytest.raises(ConfigError, match="adapters.safetensors, which was exported"):
        run(answers(*gpt2), cpu, str(exported))
    assert before == {path.name: path.read_bytes() for path in exported.iterdir()}
    with pytest.raises(
        ConfigError, match="Hugging Face's .* run's workdir is evaluated"
    ):
        configs.of_run(gpt2[0])
    config = answers(*gpt2, **{"finetuning.adapters": str(workdir)})
    with pytest.raises(ConfigError, match=r"--format=adapters writes such a file"):
        run(config, cpu, str(tmp_path / "run"))


@pytest.mark.slow
def test_averaged_adapters_of_one_device_are_used_on_four(tmp_path, four_devices, gpt2):
    one = DeviceManager.create("cpu", num_devices=1)
    config, workdir = answers(*gpt2, num_steps=4, ema_decay=0.5), tmp_path / "run"
    run(config, one, str(workdir))
    finished = Run.open(workdir, one, "latest")
    runs.export_adapters(finished, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "adapters.safetensors")
    for path, leaf in flatten(finished.state.ema_params).items():
        np.testing.assert_array_equal(tensors[path], leaf)
    expected = evaluated(workdir, one, "latest")[1]
    _, found = evaluated(tmp_path / "out", four_devices, "latest")
    # The loss to 1e-5; its exponential, of about 100, has a float32's seven digits.
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-5)


@pytest.mark.slow
def test_adapters_of_a_base_from_the_seed_have_no_home(tmp_path, cpu, gpt2, caplog):
    config = answers(*gpt2, init_from=None, num_steps=1)
    config.data.tokenizer = None
    config.model.update(SIZES)
    run(config, cpu, str(tmp_path / "run"))
    assert "frozen parameters were never trained" in caplog.text
    with pytest.raises(ConfigError, match="come from its seed"):
        runs.export_adapters(
            Run.open(tmp_path / "run", cpu, "latest"), tmp_path / "out"
        )


@pytest.mark.slow
def test_a_run_says_how_many_tokens_it_was_given(tmp_path, cpu, gpt2):
    folder, path = gpt2
    plain = {"data.tokenizer": None, "num_steps": 1, "finetuning.lora.rank": None}
    plain |= {"finetuning.train": (), "finetuning.base_dtype": "float32"}
    plain |= {"finetuning.lora.patterns": ()}
    run(answers(folder, path, **plain), cpu, str(tmp_path / "run"))
    sizes = {f"model.{key}": value for key, value in SIZES.items()}
    config = answers(tmp_path / "run", path, **plain | sizes)
    state = Experiment.from_config(config, cpu).trainer(cpu).init()
    assert len(state.params["gpt/embed"]["embeddings"]) == 300


@pytest.mark.slow
def test_a_start_that_fails_at_once_says_one_sentence(tmp_path, command, gpt2):
    folder, path = tmp_path / "whole_numbers", gpt2[1]
    shutil.copytree(gpt2[0], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].astype(
        "int32"
    )
    save_file(tensors, folder / "model.safetensors")
    flags = [f"--config.init_from={folder}", f"--config.data.path={path}"]
    flags += ["--config.data.context=64", f"--workdir={tmp_path / 'run'}"]
    done = command("train", "--config=configs/finetune_gpt2_lora.py", *flags)
    assert done.returncode == 64, done.stderr
    assert done.stderr.startswith("error: the files do not fit the model")
    assert len(done.stderr.splitlines()) == 2  # The second names the tensor.
