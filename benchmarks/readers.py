"""Readers of outside data, for `benchmarks.fuzz`: whole files, and what reads them.

`READERS` names each of them, and `ELSEWHERE` each call of the packages that opens or
parses something and is none, with the reason; `tests/test_fuzz.py` walks over both.
"""

import contextlib
import gzip
import importlib.util
import io
import json
import pickle
import socket
import struct
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Call = Callable[[], Any]
ROWS = 40  # Of the data sets.


class Reader(NamedTuple):
    """Reader of files.

    Attributes:
      write: makes a folder of whole files.
      calls: gives the calls that read it, of which the file of this name was changed.
      functions: those of the packages that read here, `module.function`.
      repair: sets what protects a changed file from chance, such as a digest.
    """

    write: Callable[[Path], None]
    calls: Callable[[Path, str], Iterator[Call]]
    functions: str
    repair: Callable[[str, bytes], bytes] = lambda name, content: content


def but(call: Call, *documented: type[BaseException]) -> Call:
    """Makes a call that returns where its docstring names the exception."""

    def run() -> None:
        with contextlib.suppress(*documented):
            call()

    return run


def write_pickles(folder: Path) -> None:
    """Writes Haiku parameters in each form that is converted."""
    import joblib

    rng = np.random.default_rng(0)
    params = {
        "mlp/linear": {
            "w": rng.normal(size=(3, 4)).astype(np.float32),
            "b": np.zeros(4, np.float16),
        },
        "mlp/norm": {"scale": np.asfortranarray(np.ones((2, 3)))},
    }
    trees = [params, (params, {"mlp": {"counter": np.int32(3)}}), OrderedDict(params)]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        tree = trees[protocol % 3]
        (folder / f"{protocol}.pkl").write_bytes(pickle.dumps(tree, protocol))
    for method in (0, "zlib", "gzip", "bz2", "xz"):
        joblib.dump(params, folder / f"{method}.joblib", compress=method)
    np.save(folder / "object.npy", np.array(params, object), allow_pickle=True)
    np.save(folder / "array.npy", params["mlp/linear"]["w"])
    flat = {f"{m}/{k}": x for m, leaves in params.items() for k, x in leaves.items()}
    np.savez(folder / "plain.npz", **flat)
    np.savez_compressed(folder / "object.npz", params=np.array(params, object))


def convert_pickle(folder: Path, name: str) -> Iterator[Call]:
    """Converts as the child process does, but for its limits."""
    from haiku_template.conversion import files, trees
    from haiku_template.conversion.__main__ import write

    def convert() -> None:
        size = (folder / name).stat().st_size
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            tree = files.load(folder / name, Path(scratch))
            arrays, _, _ = trees.choose(tree, None)
            write(Path(scratch) / "new", arrays, 4 * size + files.ALWAYS)

    yield but(convert, MemoryError, OSError)  # `main` words both.


def write_weights(folder: Path) -> None:
    """Writes published parameters, a folder of Hugging Face's, and adapters."""
    from haiku_template.pretrained import save_tensors
    from haiku_template.pretrained.tensors import INDEX
    from haiku_text import huggingface

    rng = np.random.default_rng(0)
    tensors = {
        "linear/w": rng.normal(size=(3, 4)).astype(np.float32),
        "linear/b": np.zeros(4, np.float16),
        "scale": np.float32(2),
    }
    save_tensors(folder / "single.safetensors", tensors, None)
    np.savez(folder / "single.npz", **tensors)
    np.savez_compressed(
        folder / "packed.npz", **{f"params:{k}": tensors[k] for k in tensors}
    )
    facts = {"rank": "4", "alpha": "8.0", "base_sha256": "0" * 64, "step": "20"}
    facts["axes"] = json.dumps({"linear/w": "in out"})
    save_tensors(folder / "adapters.safetensors", tensors, facts)
    (folder / "sharded").mkdir()
    places = {}
    for number, (name, array) in enumerate(tensors.items()):
        file = f"model-{number}.safetensors"
        save_tensors(folder / "sharded" / file, {name: array}, None)
        places[name] = file
    index = {"metadata": {"total_size": 60}, "weight_map": places}
    (folder / "sharded" / INDEX).write_text(json.dumps(index))
    for kind, family in huggingface.FAMILIES.items():
        (folder / kind).mkdir()
        config = huggingface.to_config(family, {}) | {"id2label": {"0": "a", "1": "b"}}
        (folder / kind / "config.json").write_text(json.dumps(config))


def read_weights(folder: Path, name: str) -> Iterator[Call]:
    """Reads parameters into those of a model, and as they are."""
    import jax

    from haiku_template.devices import DeviceManager
    from haiku_template.finetuning import adapters, source
    from haiku_template.pretrained import Names, read_published, tensors
    from haiku_template.pretrained.published import list_tensors

    path = folder / name
    if path.name == "config.json":
        yield lambda: source.with_sizes({}, str(path.parent), None)
        yield lambda: source.vocabulary_of(str(path.parent))
        return
    path = path.parent if path.parent != folder else path
    devices = DeviceManager.create("cpu", num_devices=1)
    float32 = np.dtype(np.float32)
    shapes = {
        "linear": {
            "w": jax.ShapeDtypeStruct((3, 4), float32),
            "b": jax.ShapeDtypeStruct((4,), float32),
        }
    }

    def read_all() -> None:
        for tensor in list_tensors(path):
            tensors.read_tensor(tensor)

    yield read_all
    names = Names(ignore=("*scale*",))
    yield lambda: read_published(
        path, shapes, (), None, devices=devices, rules=(), names=names
    )
    if path.suffix == ".safetensors":
        yield lambda: adapters.read_facts(path)


def write_data(folder: Path) -> None:
    """Writes a data set in each format that has a reader."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (12, 4, 4), np.uint8)
    labels = np.arange(12) % 3
    arrays = {"x_train": images, "y_train": labels, "x_test": images[:4]}
    arrays["y_test"] = labels[:4]
    np.savez(folder / "plain.npz", **arrays)
    np.savez_compressed(folder / "packed.npz", **arrays)
    save_file(arrays, folder / "a.safetensors")
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    parts = {"train": (images, labels), "t10k": (images[:4], labels[:4])}
    for part, (x, y) in parts.items():
        idx = struct.pack(">4B3I", 0, 0, 8, 3, *x.shape) + x.tobytes()
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx)
        idx = struct.pack(">4BI", 0, 0, 8, 1, len(y)) + y.astype(np.uint8).tobytes()
        packed = gzip.compress(idx)
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(packed)
    record = bytes([1]) + bytes(3072)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        (folder / name).write_bytes(record * 2)


def read_data(folder: Path, name: str) -> Iterator[Call]:
    """Makes a data set of the file's format, and a batch of it."""
    from haiku_template.data import BatchSpec, files
    from haiku_template.data.datasets import from_split

    path = folder / name
    readers = {
        ".npz": lambda: files.read_npz(path),
        ".safetensors": lambda: files.read_safetensors(path),
        ".npy": lambda: files.read_npy(folder),
        ".bin": lambda: files.read_cifar10(folder),
    }
    read = readers.get(path.suffix, lambda: files.read_mnist(folder))
    for labels in ("classes", "numbers", "any"):
        spec = BatchSpec(2, labels=labels)
        yield lambda spec=spec: from_split(read(), spec).train.batch(0)


def _pictures_set() -> Any:
    from haiku_template.data import BatchSpec, files
    from haiku_template.data.datasets import from_split

    images = np.zeros((ROWS, 4, 4, 1), np.uint8)
    labels = np.arange(ROWS) % 3
    split = files.Split(images, labels, images, labels)
    return from_split(split, BatchSpec(4))


def write_inputs(folder: Path) -> None:
    """Writes new examples: arrays, a table, pictures."""
    from PIL import Image

    images = np.arange(5 * 16, dtype=np.uint8).reshape(5, 4, 4, 1)
    np.save(folder / "x.npy", images)
    np.savez(folder / "x.npz", x=images, y=np.arange(5) % 3)
    np.savez(folder / "tree.npz", **{"inputs": images, "labels": np.arange(5) % 3})
    rows = [",".join(map(str, [*image.ravel(), 1])) for image in images]
    header = ",".join([*(f"p{i}" for i in range(16)), "label"])
    (folder / "x.csv").write_text("\n".join([header, *rows]) + "\n")
    for kind in ("png", "jpg", "bmp", "gif", "webp", "tif", "ppm"):
        (folder / kind).mkdir()
        Image.fromarray(images[0, ..., 0]).save(folder / kind / f"a.{kind}")


def read_inputs(folder: Path, name: str) -> Iterator[Call]:
    """Reads `--inputs` for a run on small pictures."""
    from haiku_template.data.examples import read_examples

    path = folder / name
    path = path.parent if path.parent != folder else path

    def read() -> None:
        dataset = read_examples(str(path), _pictures_set(), 4).dataset
        for index in range(min(dataset.num_batches, 3)):
            dataset.batch(index)

    yield read


def write_tokens(folder: Path) -> None:
    """Writes token files, texts and prompts."""
    from safetensors.numpy import save_file

    from haiku_text.data.files import TokenWriter

    ids = np.arange(200) % 50
    with TokenWriter(folder / "a.safetensors", "uint16") as writer:
        writer.write(ids)
        writer.publish()
    save_file({"a": ids, "b": ids.reshape(20, 10)}, folder / "two.safetensors")
    np.save(folder / "a.npy", ids.astype(np.uint32))
    (folder / "a.bin").write_bytes(ids.astype(np.uint16).tobytes())
    (folder / "a.txt").write_text("A text of some words.\nAnd é of another.\n" * 30)
    (folder / "prompts.txt").write_text("Once upon\na time\n")


def read_tokens(folder: Path, name: str) -> Iterator[Call]:
    """Reads windows of a token file, or a text."""
    from haiku_template.data import BatchSpec
    from haiku_text.data import documents
    from haiku_text.data.files import open_tokens
    from haiku_text.data.windows import tokens

    path, spec = folder / name, BatchSpec(2, labels="tokens")
    if path.suffix != ".txt":
        yield lambda: open_tokens(path, random=False)
        options = {"path": str(path), "context": 8, "vocab_size": 64}
        yield lambda: tokens(spec, **options).train.batch(3)
        return
    yield lambda: documents.byte_text(spec, path=str(path), context=8).train.batch(0)
    yield lambda: list(documents.pieces(documents.TextFile(path.name, path)))
    yield lambda: documents.prompt_file(str(path))


def write_lines(folder: Path) -> None:
    """Writes texts with labels, and prompts, in each format of tables."""
    texts = [{"text": f"text {i}", "label": "ab"[i % 2]} for i in range(8)]
    pairs = [{"prompt": f"sum {i}", "completion": f" {i}"} for i in range(8)]
    for name, rows in (("texts", texts), ("pairs", pairs)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
        table = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        (folder / f"{name}.csv").write_text("\n".join(table) + "\n")
    if importlib.util.find_spec("pyarrow"):  # An extra.
        from pyarrow import Table, parquet

        for packing in ("none", "snappy", "gzip", "zstd"):
            to = folder / f"{packing}.parquet"
            parquet.write_table(
                Table.from_pylist(texts * 3), to, 10, compression=packing
            )


def read_lines(folder: Path, name: str) -> Iterator[Call]:
    """Trains on a table of texts, and predicts those of a file."""
    from haiku_template.data import BatchSpec
    from haiku_text.data.jsonl import jsonl

    for labels in ("classes", "tokens", "any"):
        spec = BatchSpec(2, labels=labels)
        yield lambda spec=spec: jsonl(spec, path=str(folder / name)).train.batch(0)

    (folder / "plain.jsonl").write_text('{"text": "a", "label": "x"}\n' * 2)

    def new_lines() -> None:
        spec = BatchSpec(2)
        path = str(folder / "plain.jsonl")
        data = jsonl(spec, path=path, validation_fraction=0.0)
        data.read(folder / name).batch(0)

    yield new_lines


def write_tokenizers(folder: Path) -> None:
    """Writes tokenizers of four kinds."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    from haiku_text.data.tokenizer import learn_tokenizer

    (folder / "bpe.json").write_bytes(learn_tokenizer(["some text and more"] * 3, 270))
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "some": 3, "##text": 4, "t": 5}
    kinds = {
        "wordpiece": models.WordPiece(words, unk_token="[UNK]"),
        "wordlevel": models.WordLevel(words, unk_token="[UNK]"),
        "unigram": models.Unigram([("<unk>", 0.0), ("s", -1.0), ("t", -2.0)], 0, False),
    }
    for name, model in kinds.items():
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
        tokenizer.add_special_tokens(["[SEP]", "</s>"])
        tokenizer.save(str(folder / f"{name}.json"))


def read_tokenizer(folder: Path, name: str) -> Iterator[Call]:
    """Encodes and decodes with a tokenizer."""
    from haiku_text.data import Tokenizer

    def read() -> None:
        tokenizer = Tokenizer(folder / name)
        rows = tokenizer.encode(["some text", "é more\0"], special=True)
        tokenizer.batch(["some text"], context=8, cut=True)
        decode = tokenizer.stream()
        for token in rows[0]:
            decode(token)

    yield read


def make_trainer() -> Any:
    """Trainer of an MLP on random rows, with moments."""
    import optax

    from haiku_template.data import ArrayDataset, BatchSpec, Data
    from haiku_template.devices import DeviceManager
    from haiku_template.models import mlp
    from haiku_template.training import Experiment, classification

    inputs = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
    labels = (np.arange(32) % 3).astype(np.int32)
    return Experiment(
        model=mlp(3, width=4),
        task=classification,
        data=Data(ArrayDataset(inputs, labels, BatchSpec(8)), None, 3),
        optimizer=optax.adam(1e-3),
    ).trainer(DeviceManager.create("cpu", num_devices=1))


def write_checkpoint(folder: Path) -> None:
    """Writes the workdir of a short run, whose latest step is 4."""
    from haiku_template.runs import train

    train(make_trainer(), num_steps=4, save_every=2, workdir=folder / "run")


def read_checkpoint(folder: Path, name: str) -> Iterator[Call]:
    """Reads a checkpoint: what it gives are the bits that were saved, or an error."""
    import jax

    from haiku_template.storage import Checkpoints, manifest, workdir

    workdir_ = folder / "run"
    checkpoints, whole = workdir_ / workdir.CHECKPOINTS, _digests(workdir_)

    def verify() -> None:
        with Checkpoints(checkpoints, run=workdir.run_id(workdir_)) as reader:
            reader.best, reader.saved_facts(4)
            for step in reader.steps:
                reader.verify(step)

    def restore() -> None:
        with Checkpoints(checkpoints, run=workdir.run_id(workdir_)) as reader:
            saved = reader.saved(4)
            state = {
                field: reader.restore(4, jax.tree.map(_unread, leaves), field)
                for field, leaves in saved.items()
            }
        digest = manifest.digest_of_batch(jax.tree.map(np.asarray, state))
        assert digest == whole, "other bits than were saved"

    yield verify
    if Path(name).is_relative_to(f"run/{workdir.CHECKPOINTS}/4"):
        yield restore


def _unread(leaf: Any) -> np.ndarray:
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


_WHOLE: dict[Path, str] = {}


def _digests(workdir: Path) -> str:
    """Digest of the state of step 4, as the first call sees it: whole."""
    import jax

    from haiku_template.storage import Checkpoints, manifest

    if workdir not in _WHOLE:
        with Checkpoints(workdir / "checkpoints") as reader:
            state = {
                field: reader.restore(4, jax.tree.map(_unread, leaves), field)
                for field, leaves in reader.saved(4).items()
            }
        state = jax.tree.map(np.asarray, state)
        _WHOLE[workdir] = manifest.digest_of_batch(state)
    return _WHOLE[workdir]


def seal(name: str, content: bytes) -> bytes:
    """Sets the digest of a manifest, and the checksum of metrics, that were changed."""
    from haiku_template.storage import manifest

    try:
        values = json.loads(content)
        if Path(name).name == "manifest":
            return json.dumps(manifest.sealed(values)).encode()
        if Path(name).name == "metrics":
            values.pop("crc32", None)
            crc = zlib.crc32(json.dumps(values, sort_keys=True).encode())
            return json.dumps(values | {"crc32": crc}).encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    return content


def write_lists(folder: Path) -> None:
    """Writes the small files of a checkpoint: its manifest, metrics, Orbax's lists."""
    from haiku_template.storage import Checkpoints

    state = {"params": {"a": np.ones((3, 4), np.float32)}, "step": np.int32(2)}
    facts = {"flags": {"a": 1}, "packages": {"jax": "1"}}
    with Checkpoints(folder, run="a", facts=lambda step: facts) as checkpoints:
        checkpoints.save(2, state, {"eval/loss": 0.5})
    for path in folder.glob("2/state/**/[0-9a-f]*"):
        if path.is_file() and path.parent.name == "d":
            path.unlink()  # The arrays.


def read_lists(folder: Path, name: str) -> Iterator[Call]:
    """Reads the lists of a checkpoint without Orbax."""
    del name
    from haiku_template.storage import checkpoint, manifest

    step = folder / "2"

    def read() -> None:
        if values := manifest.read(step):
            manifest.check_sizes(values, step)

    yield but(read, ValueError)
    yield but(lambda: checkpoint.check_files(step), OSError, ValueError)
    yield lambda: checkpoint.metrics_of(step)


def write_trees(folder: Path) -> None:
    """Writes Orbax trees of others: in a database, and a folder for each leaf."""
    import orbax.checkpoint as ocp

    tree = {"linear": {"w": np.ones((3, 4), np.float32), "b": np.zeros(4)}, "n": 3}
    for ocdbt in (True, False):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=ocdbt)
        with ocp.Checkpointer(handler) as checkpointer:
            path = (folder / f"tree-{ocdbt}").absolute()
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def read_trees(folder: Path, name: str) -> Iterator[Call]:
    """Reads all leaves of an Orbax tree."""
    from haiku_template.storage import trees

    def read() -> None:
        for leaf in trees.leaves(folder / name.partition("/")[0]):
            if leaf.dtype is not None:
                list(leaf.read(leaf))

    yield read


def write_workdir(folder: Path) -> None:
    """Writes the workdir of a short run of a config."""
    from configs import digits
    from haiku_template.devices import DeviceManager
    from haiku_template.runs import start
    from haiku_template.storage.workdir import write_json

    config = digits.get_config()
    config.num_steps, config.log_every, config.save_every = 4, 1, 2
    config.eval_every, config.early_stop.patience = 2, 3
    config.optimizer.warmup_steps = 1
    devices = DeviceManager.create("cpu", num_devices=1)
    start.run(config, devices, str(folder / "run"))
    write_json(folder / "run/nonfinite.json", {"steps": [3], "rows": {"3": [1, 2]}})
    write_json(folder / "run/base.json", {"sha256": "0" * 64})
    for path in [*folder.glob("run/checkpoints/*/*"), *folder.glob("run/*.png")]:
        if path.name != "_CHECKPOINT_METADATA":  # By which a step counts as saved.
            _remove(path)
    _remove(folder / "run/tensorboard")


def _remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path) if path.is_dir() else path.unlink()


def read_workdir(folder: Path, name: str) -> Iterator[Call]:
    """Reads what a run, its report, and the commands on runs read of a workdir."""
    from rich.console import Console

    from haiku_template import config
    from haiku_template.finetuning import source
    from haiku_template.reporting import goodput, plots
    from haiku_template.runs import comparison, rewind
    from haiku_template.storage import metrics, workdir
    from haiku_template.storage.metrics import MetricsWriter

    run = folder / "run"
    default = config.to_dict(config.default_config())
    yield lambda: config.of_run(run)
    yield lambda: workdir.check(run, default)
    yield lambda: workdir.update_config(run, default)
    yield lambda: workdir.of_script(run, {}, {})
    yield lambda: workdir.mark_saved(run, 2)
    yield lambda: [workdir.run_id(run), workdir.chosen(run, "packs", False)]
    yield lambda: workdir.chosen(run, "steps_per_call", 1)
    yield lambda: sorted(workdir.left_out(run))
    yield lambda: sorted(rewind.steps_of("auto", run))
    yield lambda: goodput.described(goodput.goodput(run))
    yield lambda: MetricsWriter(run, 2).close()
    yield lambda: source.is_folder(str(run))
    yield lambda: source.vocabulary_of(str(run))

    def compare() -> None:
        runs = comparison.summarize_runs(folder)
        comparison.as_csv(runs)
        Console(file=io.StringIO()).print(comparison.as_table(runs))

    yield compare

    def plot() -> None:
        for title, lines in plots.panels(metrics.read(run / workdir.METRICS)).items():
            plots.scale(title, lines)

    yield plot


HELLO = {"index": 1, "count": 2, "facts": {"jax": "1"}, "host": "a", "nonce": "0" * 32}


def write_messages(folder: Path) -> None:
    """Writes lines that processes of a run send each other, and their variables."""
    from haiku_template.cluster import identity

    lines = {
        "greeting": {"start": "0" * 32, "nonce": "1" * 32},
        "hello": HELLO,
        "sealed": identity.sealed(HELLO, b"key", "1" * 32),
        "unseen": {"unseen": 1},
    }
    for name, message in lines.items():
        (folder / name).write_text(json.dumps(message) + "\n")
    beats = [{}, {"stalled": "all"}, {"lost": "process 1", "code": 69}]
    beats += [{"left": "an error", "code": 74}, {"left": "", "code": 0}]
    text = "\n \n" + "".join(json.dumps(beat) + "\n" for beat in beats)
    (folder / "beats").write_text(text)
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    slurm |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "12"}
    slurm |= {"SLURM_STEP_TASKS_PER_NODE": "2(x1)", "SLURM_LOCALID": "1"}
    torch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "123", "RANK": "1"}
    torch |= {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    mpi |= {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911"}
    mpi |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    for name, variables in (("slurm", slurm), ("torch", torch), ("mpi", mpi)):
        (folder / f"{name}.json").write_text(json.dumps(variables))


def read_messages(folder: Path, name: str) -> Iterator[Call]:
    """Reads a message as each of those that may get it from a stranger."""
    from haiku_template.cluster import detection, identity, rendezvous
    from haiku_template.cluster.heartbeat import Heartbeat

    content = (folder / name).read_bytes()[:100_000]
    if name.endswith(".json"):
        detection._address_of = str  # Without a call of scontrol.
        with contextlib.suppress(ValueError, TypeError):  # The form is of the fuzzer.
            values = {str(k): str(x) for k, x in dict(json.loads(content)).items()}
            yield lambda: detection.detect(values)
        return

    def link() -> socket.socket:
        for old in _LINKS:
            old.close()
        _LINKS[:] = socket.socketpair()
        _LINKS[1].sendall(content)
        _LINKS[1].shutdown(socket.SHUT_WR)
        return _LINKS[0]

    start = identity.Start("0" * 32, b"key")

    def hear(there: socket.socket, hello: dict[str, Any], is_known: bool) -> None:
        del is_known
        there.close()
        if rendezvous._is_hello(hello):
            rendezvous._name(hello)
            rendezvous._mismatch({0: HELLO | {"index": 0}}, hello)
        rendezvous._claimed(hello, 2)

    class Listening(Heartbeat):
        def _lose(self, fault: str, code: int | None = None) -> None:
            identity.printable(fault)

    def greet() -> None:
        identity._UNKNOWN.acquire(blocking=False)
        identity._greet(link(), start, hear)

    yield but(lambda: identity.read(link(), 1.0), OSError, ValueError)
    yield greet

    def present() -> None:
        identity.present(link(), HELLO, lambda number: start, 1.0)

    yield but(present, OSError, ValueError)
    heartbeat = Listening.__new__(Listening)
    heartbeat.index, heartbeat._stalled, heartbeat._finished = 0, {}, {}
    heartbeat.peers = []
    yield lambda: heartbeat._listen(rendezvous.Peer("process 1", link()))
    for old in _LINKS:
        old.close()


_LINKS: list[socket.socket] = []  # Of the call before.


def write_code(folder: Path) -> None:
    """Writes code for the doctor, facts of a machine, and words of its children."""
    code = "import jax\nimport haiku as hk\nx = jax.tree_map(lambda y: y, {})\n"
    code += "from jax import linear_util\n%time x = jax.xla_computation\n"
    (folder / "a.py").write_text(code)
    cell = {"cell_type": "code", "source": code.splitlines(keepends=True)}
    text = {"cell_type": "markdown", "source": ["jax"]}
    notebook = {"cells": [cell, text], "nbformat": 4, "metadata": {}}
    (folder / "b.ipynb").write_text(json.dumps(notebook))
    files = {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX 580.95.05  Release\n",
        "proc/self/status": "Name:\tpython\nCapEff:\t00000000a80425fb\n",
        "proc/self/cgroup": "0::/docker/123\n",
        "proc/modules": "nvidia 1 0 - Live 0x0\nnouveau 2 0 - Live 0x0\n",
        "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
        "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
        "sys/class/kfd/kfd/topology/nodes/0/properties": "simd_count 10\n",
        "requires": 'numpy>=2.1 ; extra == "cuda"\n',
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (folder / "child").write_text('{"code": 0, "count": 1}\n{"version": 13000}\n')


def read_code(folder: Path, name: str) -> Iterator[Call]:
    """Reads code, and diagnoses the machine whose files lie in the folder."""
    from jax_doctor import Machine, children, table
    from jax_doctor.code import files

    path = folder / name
    if path.suffix in (".py", ".ipynb"):
        yield lambda: files.lines(files.report(path))
        return
    text = path.read_text(errors="replace")
    if name == "child":
        child = children.Child(0, text, "", 0.0) if _fits(children.Child, 4) else None
        yield lambda: child and children._values(child, dict)
        return
    requires = (text,) if name == "requires" else ()
    packages = {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.3.0"}
    machine = Machine({}, folder, packages, {"jax": requires})
    yield lambda: table.check_environment("gpu", machine)
    yield lambda: machine.requirements("jax")


def _fits(kind: Any, number: int) -> bool:
    return len(kind._fields) == number


def write_words(folder: Path) -> None:
    """Writes words of commands: of a sweep, of devices, of steps."""
    lines = {
        "sweep": "optimizer.learning_rate=1e-4,3e-4",
        "tuple": "finetuning.train=('a',),('b','c')",
        "device": "gpu:0,2",
        "address": "node1:12355",
        "rewind": "812,815:820",
        "profile": "10:20",
        "replay": "first:8,every:1000",
    }
    for name, text in lines.items():
        (folder / name).write_text(text)


def read_words(folder: Path, name: str) -> Iterator[Call]:
    """Parses a word as each command would."""
    from haiku_template import cli, config
    from haiku_template.cluster import rendezvous
    from haiku_template.combinations import combinations
    from haiku_template.devices import selection
    from haiku_template.runs import rewind

    text = (folder / name).read_bytes().decode(errors="replace")[:10_000]
    base = config.default_config()
    yield lambda: combinations(base, folder, text.split(" "))
    yield lambda: selection.parse(text)
    yield lambda: rendezvous.parsed(text)
    yield lambda: rewind.steps_of(text, folder)
    yield lambda: config.interval(text, 100)
    yield lambda: config.replayed_steps(text)(3)
    if cli.LITERAL.fullmatch(f"--config.model.remat={text}"):
        # As `_parse` words it.
        yield but(lambda: cli._literal("model.remat", text), ValueError)


READERS = {
    "pickles": Reader(
        write_pickles,
        convert_pickle,
        "conversion.files conversion.pickles conversion.__main__.main",
    ),
    "weights": Reader(
        write_weights,
        read_weights,
        "pretrained.npz pretrained.tensors pretrained.published pretrained.reading "
        "finetuning.adapters finetuning.source haiku_text.huggingface.describe",
    ),
    "data": Reader(write_data, read_data, "data.files"),
    "inputs": Reader(write_inputs, read_inputs, "data.examples"),
    "tokens": Reader(
        write_tokens, read_tokens, "haiku_text.data.files haiku_text.data.documents"
    ),
    "lines": Reader(write_lines, read_lines, "data.rows"),
    "tokenizer": Reader(write_tokenizers, read_tokenizer, "haiku_text.data.tokenizer"),
    "checkpoint": Reader(write_checkpoint, read_checkpoint, "storage.checkpoint", seal),
    "lists": Reader(
        write_lists,
        read_lists,
        "storage.manifest storage.checkpoint bounded",
        seal,
    ),
    "trees": Reader(write_trees, read_trees, "storage.trees"),
    "workdir": Reader(
        write_workdir,
        read_workdir,
        "config.load config.of_run storage.workdir storage.metrics reporting.goodput "
        "runs.comparison runs.rewind sweep._state",
    ),
    "messages": Reader(
        write_messages,
        read_messages,
        "cluster.heartbeat cluster.identity cluster.detection",
    ),
    "doctor": Reader(write_code, read_code, "jax_doctor"),
    "words": Reader(
        write_words, read_words, "cli._literal combinations devices.selection"
    ),
}
# Calls that open or parse something, and are no readers of outside data.
ELSEWHERE = {
    "cli.open_run": "opens a run, whose files have readers of their own",
    "runs.start._taken": "reads the config of a run, which has a reader",
    "haiku_text.generate.main": "restores parameters",
    "signals.is_of_output": "opens nothing but /dev/null",
    **dict.fromkeys(
        (
            "cluster.relay",
            "data.shared",
            "data.workers._receive",
        ),
        "words of this run's own processes, over sockets that no other has",
    ),
    **dict.fromkeys(
        (
            "conversion.__main__.limit_memory",
            "reporting.display",
            "haiku_text.generate.guarded",
            "signals._fill_standard_files",
            "signals._output_is_lost",
            "xla_flags",
        ),
        "of the system: /proc, /dev/null, JAX's own libraries, what is written",
    ),
    "compat.run": "a script, which Python runs",
    "runs.hooks": "a picture that this process drew",
    "reporting.profile._device_lines": "a trace that JAX wrote in this process",
    # Not fuzzed, though others may have written what they read.
    "preflight.targets.target_devices": "text for XLA, which parses it",
    "preflight.fingerprint._check": "program.json, which `bounded` parses",
    **dict.fromkeys(
        ("reporting.trackers", "runs.resume._restored"),
        "config.json, which has been checked",
    ),
    "haiku_text.data.jsonl.__getitem__": "lines that this process has packed",
    "storage.mirror": "copies files, which `checkpoint` then reads",
    "haiku_text.prepare": "asks for the first bytes of a text, and copies a tokenizer",
    "haiku_text.huggingface.export_like": "a folder that `weights` has read",
    "haiku_text.huggingface.export": "a tokenizer.json, which `Tokenizer` has read",
    "pretrained.archive._copy_others": "an archive that `weights` has read",
}
