"""Device flags, flag parsing and exit codes of the commands.

Imports no JAX, so that `--help` and a mistyped flag answer at once.
"""

import ast
import contextlib
import errno
import functools
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags import config_path

import jax_doctor
from haiku_template import (
    cluster,
    compat,
    config,
    program_cache,
    registry,
    shipped,
    signals,
)
from haiku_template.bounded import is_file
from haiku_template.errors import (
    MEANT,
    ConfigError,
    DeviceError,
    Interrupted,
    StorageError,
    axis_advice,
    memory_full,
    near,
)

if TYPE_CHECKING:
    from haiku_template.devices import DeviceManager
    from haiku_template.runs import Run

HELP = re.compile(r"--?(h|\?|help|helpfull|helpshort|helpxml)(=true)?")
# The home folder in a value, which a shell leaves as it is behind a =; words are joined
# by zeros. A prompt is text, and names of modules hold a ~, too: a pattern of remat.
HOME = re.compile(
    r"(?<=\0)(--?(?!prompt[=\0]|config\.model\.remat)[\w.]+[=\0])(~(?=[/\0]|$)[^\0]*)"
)
# `--config.KEY=None` for numbers, and tuples for keys that a config lacks: config_flags
# refuses both. Why: docs/decisions/training.md#none
TUPLE = r"(?:(?<=\.model\.remat=)|(?<=\.data\.classes=))\(.*\)"
LITERAL = re.compile(rf"--?config\.([\w.]+)=(None|{TUPLE})")
NONE = re.compile(r"(?<=\0)(--?config\.[\w.]+)\0None(?=\0|$)")  # In two words.
NAMED = (
    "; a module that a config names, as in config.model.name='MODULE:FUNCTION', is "
    "imported after the flags, and may define them"
)
KEYS = "; keys of a sweep are words without dashes, such as seed=0,1"


class Flags:
    """absl's flags; those of the command stay what its line said.

    Code of others, imported for a run, may define flags of the same names, and gets the
    value of one that was on the line.
    """

    def __init__(self) -> None:
        self.__dict__["held"] = {}

    def hold(self) -> None:
        """Keeps the flags that are parsed, beside others of their names to come."""
        for name in flags.FLAGS:
            module = flags.FLAGS.find_module_defining_flag(name) or ""
            if not module.startswith("absl."):
                self.held[name] = flags.FLAGS[name]
                self.held[name].allow_override = True

    def __getitem__(self, name: str) -> Any:
        return self.held[name] if name in self.held else flags.FLAGS[name]

    def __getattr__(self, name: str) -> Any:
        held = self.held.get(name)
        return getattr(flags.FLAGS, name) if held is None else held.value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.held:
            self.held[name].value = value
        else:
            setattr(flags.FLAGS, name, value)

    def __contains__(self, name: str) -> bool:
        return name in (self.held or flags.FLAGS)

    def __iter__(self) -> Iterator[str]:
        return iter(flags.FLAGS)

    def __len__(self) -> int:
        return len(flags.FLAGS)

    def __call__(self, argv: list[str]) -> list[str]:
        """Parses the words of a command; returns those that are no flags."""
        return flags.FLAGS(argv)


FLAGS = Flags()
# What a path that was asked for may be, beside absent: Python raises where it looks.
UNSEEN = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP}
OWN = tuple(str(Path(__file__).parents[1] / f"haiku_{x}") for x in ("template", "text"))
# What others call flags; keys of a config are in `config.ALIASES`.
OTHER_FLAGS = {
    **dict.fromkeys(("gpus", "devices"), "--num_devices=2, or --device=gpu:0,1"),
    **dict.fromkeys(("cuda", "accelerator"), "--device=gpu"),
    **dict.fromkeys(("output_dir", "outdir", "save_dir"), "--workdir=DIR"),
    **dict.fromkeys(("logdir", "default_root_dir", "ckpt_dir"), "--workdir=DIR"),
    **dict.fromkeys(("ckpt", "ckpt_path"), "--checkpoint=best"),
    **dict.fromkeys(("debug", "fast_dev_run", "sanity_check"), "--check"),
    "gpu": "--device=gpu:0",
    "resume": "the same command again, which resumes the run in its --workdir",
    "input": "--inputs",
}

flags.DEFINE_string(
    "device", "auto", "auto, cpu, gpu, tpu, or chosen devices: gpu:1, or gpu:0,2."
)
flags.DEFINE_integer("num_devices", None, "Use the first N; all by default.")
flags.DEFINE_integer("simulate_devices", None, "Make the CPU appear as N devices.")
flags.DEFINE_enum(
    "fallback", "error", ["error", "cpu"], "What to do when --device cannot be had."
)
flags.DEFINE_float("gpu_memory_fraction", None, "Share of a card's memory for JAX.")
flags.DEFINE_string(
    "gpu_memory", None, "unified:2.0: twice a card's memory, the host's beyond it."
)
flags.DEFINE_bool("gpu_preallocate", None, "Reserve that memory at the start.")
flags.DEFINE_string(
    "coordinator_address", None, "Of several processes: HOST:PORT of process 0."
)
flags.DEFINE_integer("num_processes", None, "Processes of this run, all told.")
flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
flags.DEFINE_list("local_device_ids", None, "Cards of this process, of those it sees.")
flags.DEFINE_enum(
    "distributed",
    "auto",
    ["auto", "on", "off"],
    "Several processes: as the flags above or Slurm or MPI say, surely, or not at all.",
)
flags.DEFINE_float(
    "join_seconds", 300.0, "End when not all processes of the run came so soon."
)
flags.DEFINE_float(
    "stall_seconds", 1800.0, "End the run when processes wait so long for another."
)
PROCESSES = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
SECONDS = ("join_seconds", "stall_seconds")
for _name in SECONDS:  # Others would end a run that is well.
    flags.register_validator(
        _name,
        lambda seconds: 0 < seconds <= 1e8,
        f"possible is a number of seconds above 0, such as {FLAGS[_name].default:g}",
    )
WHERE = ("device", "num_devices", "simulate_devices", "fallback")
# Arguments of `DeviceManager.create` that have the names of flags.
OPTIONS = ("simulate_devices", "fallback", "gpu_memory_fraction", "gpu_preallocate")
OPTIONS += ("gpu_memory",)
WORDS: list[str] = []  # Of the command, with those of each --flagfile.
define_config = functools.partial(
    config_flags.DEFINE_config_file,
    "config",
    None,
    "The experiment: a .py file; with :ARG at its end, get_config(ARG) is called.",
    # Data sets, models and tasks take keys of their own; `config.check` sees others.
    accept_new_attributes=True,
    lock_config=False,
    sys_argv=WORDS,
)
signals.CALLED.append(lambda *_: jax_doctor.end_children())


def device_manager(num_devices: int | None = None) -> "DeviceManager":
    """Imports JAX and picks the devices that the flags ask for, or says why not.

    `num_devices` counts where no flag does; None means all.
    """
    device = "cpu" if FLAGS.simulate_devices else FLAGS.device
    for finding in jax_doctor.check_environment(device):  # JAX's errors mislead.
        if finding.severity == "error" and FLAGS.fallback != "cpu":
            raise DeviceError(f"--device={device} cannot be used: {finding}")
        logging.warning("%s", finding)
    if (processes := _processes()) is not None:
        _join(*processes)
    from haiku_template.devices import DeviceManager

    if processes is None or not cluster.is_joined():
        program_cache.use()
    if FLAGS.num_devices is not None or ":" in FLAGS.device:
        num_devices = FLAGS.num_devices
    return DeviceManager.create(
        FLAGS.device,
        num_devices=num_devices,
        **{name: FLAGS[name].value for name in OPTIONS},
    )


def target_devices(target: str) -> "DeviceManager":
    """Makes the devices of a --target, or raises `ConfigError` for other flags."""
    if not FLAGS.dry_run:
        raise ConfigError(
            f"--target={target} only compiles, for GPUs that are not here; "
            "give --dry_run, too"
        )
    if conflicts := [f"--{name}" for name in WHERE if FLAGS[name].present]:
        raise ConfigError(
            f"--target={target} says which GPUs, and how many, as in h100x8;"
            f" leave out {', '.join(conflicts)}"
        )
    from haiku_template.preflight import targets

    return targets.target_devices(target, FLAGS.gpu_memory_fraction, FLAGS.gpu_memory)


def _resumes() -> bool:
    """True if there may be a checkpoint to resume from."""
    from haiku_template.storage.workdir import has_checkpoints

    workdir = FLAGS.workdir if "workdir" in FLAGS else None
    return workdir is None or has_checkpoints(Path(workdir))


def _processes() -> tuple | None:
    """Arguments of `cluster.join`; None for a process on its own."""
    is_launched = not cluster.LAUNCHERS.isdisjoint(os.environ)
    is_told = any(FLAGS[name].value is not None for name in PROCESSES)
    alone = FLAGS.distributed == "auto" and not is_launched and not is_told
    return None if alone else _several_processes()


def _several_processes() -> tuple | None:
    ids = FLAGS.local_device_ids
    if ids is not None and not all(number.isdecimal() for number in ids):
        raise ConfigError(
            f"--local_device_ids={','.join(ids)} is not understood; possible are "
            "numbers of cards that this process sees, such as 0,1"
        )
    return cluster.asked(
        FLAGS.distributed,
        os.environ,
        coordinator_address=FLAGS.coordinator_address,
        num_processes=FLAGS.num_processes,
        process_id=FLAGS.process_id,
        local_device_ids=None if ids is None else [int(number) for number in ids],
    )


def _join(
    address: str, count: int, index: int, local_device_ids: Sequence[int] | None
) -> None:
    """Joins the processes of the run, and watches for one that stalls."""
    workdir = FLAGS["workdir"].value if "workdir" in FLAGS else None
    cluster.join(address, count, index, local_device_ids, FLAGS.join_seconds, workdir)
    if index:
        logging.set_verbosity(logging.ERROR)  # Process 0 says what all would say.
    from haiku_template.devices.processes import waited

    cluster.watch(waited, FLAGS.stall_seconds, _resumes)


def run_flags(required: bool = True) -> None:
    """Defines --workdir, --checkpoint, --experiment, --trust: for `open_run`."""
    flags.DEFINE_string("workdir", None, "The directory of the run.", required=required)
    flags.DEFINE_string("checkpoint", "latest", "Which one: latest, best, or a step.")
    flags.DEFINE_string(
        "experiment",
        None,
        "For a script's run: MODULE:FUNCTION, maps devices to the Experiment.",
    )
    flags.DEFINE_multi_string(
        "trust",
        [],
        "PATHS or MODULES whose code the run's config may name, beside this folder.",
    )


def need(*names: str) -> None:
    """Raises `ConfigError` for a flag that was not given."""
    for name in names:
        if FLAGS[name].value in (None, ""):
            raise ConfigError(f"--{name} is needed; --help shows all flags")


def list_targets() -> None:
    """Prints the GPUs that --target knows."""
    from haiku_template.preflight.targets import CARDS

    for name, card in CARDS.items():
        print(f"{name:<10} NVIDIA {card.name}, {card.gigabytes} GB")


def open_run(num_devices: int | None = None) -> "Run":
    """Opens the run that the flags name, on the devices that they ask for.

    Raises `ConfigError` without a run, before JAX starts, or `DeviceError`.
    """
    need("workdir")
    experiment = None
    if (processes := _processes()) is not None and processes[1] > 1:
        raise ConfigError(
            f"{processes[1]} processes were started, and this command is for one; "
            "start it once, or give --distributed=off to do it in each"
        )
    trust = ",".join(FLAGS.trust).split(",") if FLAGS.trust else []
    if FLAGS.experiment is None:
        config.of_run(Path(FLAGS.workdir), trust)
    else:
        experiment = registry.resolve("--experiment", name := FLAGS.experiment, {})
        registry.check_takes(f"--experiment={name!r}", experiment, "devices")
    devices = device_manager(num_devices)
    from haiku_template.runs import Run

    return Run.open(FLAGS.workdir, devices, FLAGS.checkpoint, experiment, trust)


def run(main: Callable[..., None], arguments: bool = False) -> None:
    """Parses the flags, calls `main` and exits; users' mistakes show no traceback.

    An exception with an `exit_code` is a sentence for the user, another is a defect.
    With `arguments`, `main` gets the words that are no flags.
    """

    def guarded(argv: list[str]) -> None:
        if signals.are_installed():
            signals.watch()  # From here on the main thread may be in C for long.
        # JAX reports each backend that it tries at this level, Orbax each save.
        logging.set_verbosity(logging.WARNING)
        FLAGS.hold()
        try:
            main(*[argv[1:]] * arguments)
        except SystemExit as error:
            cluster.ended(error)  # Why: docs/decisions/cluster.md#ends
            raise
        finally:
            signals.ignore()  # It ends by itself now.
        if cluster.HEARTBEATS:
            cluster.leave()

    if not getattr(sys.modules["__main__"], "__file__", "").startswith(OWN):
        for flag in FLAGS.get_key_flags_for_module(__name__):  # For a script's --help.
            FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    with signals.closed_pipes():
        try:
            app.run(guarded, flags_parser=lambda argv: _parse(argv, arguments))
        except BaseException as error:
            if not isinstance(error, SystemExit):
                _end(error)
            raise


def _end(error: BaseException) -> None:
    """Exits with the sentence of an error and its code; returns for a defect."""
    several = cluster.is_joined()
    error = (several and cluster.lost(error)) or _of_a_user(error) or error
    interrupted = signals.INTERRUPTED if isinstance(error, KeyboardInterrupt) else None
    code = getattr(error, "exit_code", interrupted)
    advice = compat.advice(error) or axis_advice(error)
    if code is None:
        if advice:
            error.add_note(advice)
        cluster.leave(f"{type(error).__name__}: {error}")
        if several:
            traceback.print_exc()
            os._exit(1)  # Why: docs/decisions/cluster.md#no-atexit
        return
    sentence = str(error) or "interrupted before the state could be saved"
    cluster.leave("" if isinstance(error, Interrupted) else sentence, code)
    with contextlib.suppress(OSError):  # Its reader may be gone.
        sys.stdout.flush()
    said = "; ".join(filter(None, (sentence, advice)))
    signals.say(f"error: {said}")
    alone = several and not isinstance(error, Interrupted)
    if alone or code == StorageError.exit_code:
        os._exit(code)  # Without waiting for threads that write.
    sys.exit(code)


def _unseen(error: BaseException) -> ConfigError | None:
    """Names the path that may not be looked at; None if others' code looked."""
    stdlib = ("<frozen", sysconfig.get_path("stdlib"))
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    outer = [x for x in files if "site-packages" in x or not x.startswith(stdlib)]
    is_own = bool(outer) and outer[-1].startswith(OWN) and isinstance(error, OSError)
    if is_own and error.errno in UNSEEN and error.filename is not None:
        return ConfigError(f"{error.filename} cannot be used: {error.strerror}")
    return None


def _of_a_user(error: BaseException) -> Exception | None:
    """Error that says what a user can mend, or None."""
    known = _nowhere(error) or _unseen(error) or _no_choice(error) or _unprinted(error)
    return known or memory_full(error)


def _nowhere(error: BaseException) -> ConfigError | None:
    """Says that the current directory is gone, which an error of a path does not."""
    if any(isinstance(x, FileNotFoundError) for x in (error, error.__cause__)):
        try:
            os.getcwd()
        except FileNotFoundError:
            return ConfigError(
                "the current directory was removed, or made anew under its name; "
                'cd "$PWD" enters it again'
            )
    return None


def _unprinted(error: BaseException) -> StorageError | None:
    """Says that what was printed could not be written, as to a file on a full disk."""
    may_be = isinstance(error, OSError) and error.filename is None
    if may_be and signals.is_of_output(error):
        return StorageError(f"standard output: {error.strerror}")
    return None


def _no_choice(error: BaseException) -> ConfigError | None:
    """Names the variable whose value JAX refuses as it is imported."""
    start = jax_doctor.start
    match = re.fullmatch(start.NO_CHOICE, str(error))
    if match is None or os.environ.get(name := match[2].upper()) != match[1]:
        return None
    return ConfigError(f"{name}={match[1]} is no value that JAX takes; {start.CHOOSE}")


def _parse(argv: list[str], has_arguments: bool) -> list[str]:
    try:
        argv = FLAGS.read_flags_from_files(argv, force_gnu=False)
        end = argv.index("--") if has_arguments and "--" in argv else len(argv)
        argv, behind = argv[:end], argv[end + 1 :]
        argv = NONE.sub(r"\1=None", HOME.sub(_at_home, "\0".join(argv))).split("\0")
        file = _config_file(argv)
        if file and not is_file(file):
            argv, file = _shipped(argv, file)
        argv = _without_overridden(argv) if any(map(LITERAL.fullmatch, argv)) else argv
        literals = {x: match for x in argv if (match := LITERAL.fullmatch(x))}
        WORDS[:] = [word for word in argv if word not in literals]
        if file and any(map(HELP.fullmatch, argv)):
            argv, literals = _print_keys(file, argv, literals), {}
        arguments = FLAGS([word for word in argv if word not in literals]) + behind
        if len(arguments) > 1 and not has_arguments:
            raise ValueError(
                f"unexpected argument {arguments[1]!r}; flags begin with --"
            )
        if file is not None and (literals or not _has_config()):
            _set_literals(file, literals.values())
        return arguments
    except BrokenPipeError:  # Of `--help | head`.
        raise
    except SystemExit as error:  # absl's help ends with 1, which is an error's.
        asks = any(map(HELP.fullmatch, argv))
        raise SystemExit(0 if asks else error.code) from None
    except Exception as error:
        raise _of_flags(error, argv, has_arguments) from error


def _of_flags(error: Exception, argv: list[str], has_arguments: bool) -> Exception:
    if isinstance(error, flags.CantOpenFlagFileError | UnicodeDecodeError):
        cause = str(error).rpartition("flagfile: ")[2]
        return ConfigError(f"a --flagfile cannot be read: {cause}")
    sentence = _sentence(error, argv)
    name = getattr(error, "flagname", "")
    is_key = name in config.default_config() or "flag --config." in str(error)
    sentence += KEYS * (has_arguments and "config" in FLAGS and is_key)
    if isinstance(error, flags.DuplicateFlagError):
        sentence = sentence.partition(" Description from ")[0] + NAMED
    return _of_a_user(error) or ConfigError(sentence)


def _at_home(match: re.Match) -> str:
    return match[1] + os.path.expanduser(match[2])


def _without_overridden(argv: list[str]) -> list[str]:
    """Leaves out words such as `--config.KEY=None` that a later word overrides."""

    def is_last(place: int, key: str) -> bool:
        later = re.compile(rf"--?config\.{re.escape(key)}(=|$)")
        return not any(map(later.match, argv[place + 1 :]))

    keys = [match and match[1] for match in map(LITERAL.fullmatch, argv)]
    pairs = enumerate(zip(argv, keys, strict=True))
    return [word for i, (word, key) in pairs if key is None or is_last(i, key)]


def _print_keys(
    file: Path, argv: list[str], literals: dict[str, re.Match]
) -> list[str]:
    """Prints the keys of the config that was given; returns words that ask for help."""
    FLAGS([x for x in argv if x not in literals and not HELP.fullmatch(x)])
    _set_literals(file, literals.values())
    values = FLAGS["config"].value.to_dict()
    if isinstance(values.get("data"), dict):
        values["data"] = _keys_of_data(values["data"])
    print(f"keys of {_config_file(argv)}, and their values:\n")
    for key, value in config.flatten(values, "config.").items():
        print(f"  --{key}={value}")
    print()
    return [argv[0], "--help"]  # absl prints the flags, and ends.


def _keys_of_data(values: dict[str, Any]) -> dict[str, Any]:
    """Adds keys that a config leaves out, with their defaults, for a set of ours."""
    from haiku_template.data import DATASETS

    if (name := values.get("name")) not in DATASETS:  # A user's code is not imported.
        return values
    function = registry.resolve("data", name, DATASETS)
    parameters = inspect.signature(function).parameters.values()
    usual = {x.name: x.default for x in parameters if x.kind == x.KEYWORD_ONLY}
    usual |= config.default_config().data.to_dict()
    return dict(sorted((usual | values).items()))


def _meant(name: str, text: str) -> str:
    """Says the flag or key that an unknown flag may mean; by default absl's guess."""
    if (flag := OTHER_FLAGS.get(name)) is not None:
        return MEANT.format(flag)
    if "config" in FLAGS:
        keys = config.flatten(config.default_config().to_dict(), "config.")
        similar = [key for key in keys if key.endswith(f".{name}")]
        if name in config.ALIASES:
            similar = [f"config.{config.ALIASES[name]}"]
        if similar:
            return MEANT.format(f"--{' or --'.join(similar)}")
    return "".join(text.partition(". Did you mean")[1:])


def _shipped(argv: list[str], file: Path) -> tuple[list[str], Path]:
    """Names a config that is shipped; raises `ValueError` if none has this name."""
    if (words := shipped.with_shipped(argv, file)) is not None:
        return words, _config_file(words)
    there = sorted(str(path) for path in file.parent.glob("*.py"))
    home, own = shipped.folder("configs"), sorted(Path("configs").glob("*.py"))
    names = sorted(x.stem for x in home.glob("*.py")) if home else []
    by_name = f"; by name there are {', '.join(names)}" if names else ""
    paths = {Path(x).stem: x for x in [*names, *map(str, own), *there]}
    guess = near(re.split("[./]", str(file).removesuffix(".py"))[-1], paths, "{}")
    meant = MEANT.format(f"--config={paths[guess]}") if guess else ""
    raise ValueError(
        f"the config file {file} does not exist{meant}; {file.parent} holds "
        f"{', '.join(there[:8]) or 'no .py files'}{by_name}"
    )


def _has_config() -> bool:
    return isinstance(FLAGS["config"].value, ConfigDict)


def _set_literals(file: Path, literals: Iterable[re.Match]) -> None:
    """Sets the keys that config_flags could not, in the config of a file."""
    values = FLAGS["config"].value
    if not _has_config():
        hasattr(values, "keys")  # Raises if the file could not be read.
        raise ValueError(_returned(file, values))
    for match in literals:
        value = _literal(match[1], match[2])
        # Patterns may take the place of a model's own switch, such as GPT's.
        with values.ignore_type():
            config_path.set_value(match[1], values, value, accept_new_attributes=True)


def _literal(key: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except config.NO_LITERAL as error:
        raise ValueError(
            f"--config.{key}={text} cannot be read; possible is a tuple of texts, such "
            "as ('*/block_*',)"
        ) from error


def _config_file(argv: list[str]) -> Path | None:
    """File of the last --config, without its function's argument."""
    files = re.findall(r"\0--?config[=\0]([^:\0]*)", "\0".join(argv))
    return Path(files[-1]) if files else None


def _returned(file: Path | None, value: Any) -> str:
    kind = "None" if value is None else f"a {type(value).__name__}"
    return (
        f"get_config() of {file} returns {kind}; it must return a ConfigDict, such as "
        "default_config() with changes"
    )


def _sentence(error: Exception, argv: list[str]) -> str:
    """Cuts an error of absl or ml_collections down to its cause and place."""
    text = str(error.args[0] if error.args else error).strip()
    last = text.split("\n")[-1]
    frames = traceback.extract_tb(error.__traceback__)
    places = re.findall(r'File "(\S+)", line (\d+)', text) or [f[:2] for f in frames]
    if isinstance(error, SyntaxError):
        places.append((error.filename, error.lineno))
    internal = ("<", __file__, sysconfig.get_path("stdlib"))
    places = [
        f"{name}, line {line}"
        for name, line in places
        if "site-packages" not in name and not name.startswith(internal)
    ]
    if places:
        name = f"{type(error).__name__}: " * isinstance(error, LookupError)
        cause = repr(last) if isinstance(error, KeyError) else last
        return f"{places[-1]}: {name}{cause}"
    file = _config_file(argv)
    if "get_config() takes" in last or "get_config() missing" in last:
        return f"{file} (what follows a colon is its argument): {last}"
    if "has no attribute 'get_config'" in text:
        return f"{file} has no function get_config(), which returns the config"
    if file and "flag --config=None" in text:
        return _returned(file, None)
    if not isinstance(error, flags.Error):
        keys = re.findall(r"\0--?config\.([^=\0]*)", "\0".join(argv))
        odd = [key for key in keys if not all(map(str.isidentifier, key.split(".")))]
        odd += re.findall(r"to lookup: (\S+)", last)  # A key of what has none.
        odd = [*map(repr, odd), *[last] * isinstance(error, KeyError)]
        return f"the config has no key {odd[0]}" if odd else last
    if isinstance(error, flags.UnrecognizedFlagError):
        text = text.partition(". Did you mean")[0] + _meant(error.flagname, text)
    numbers = ("literal for int", "a whole number"), ("to float", "a number")
    for fault, kind in (*numbers, ("Non-boolean argument", "true or false")):
        sentence = rf"\1 has the wrong type: {kind} is needed here"
        text = re.sub(rf"flag (\S+): .*(?:{fault}).*", sentence, text)
    required = r"flag --(\w+)=None: .*must have a value.*"
    return re.sub(required, r"--\1 is needed; --help shows all flags", text)
