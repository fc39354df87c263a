"""Pickles, read without unpickling: their opcodes make containers and arrays alone.

Nothing that a pickle names is imported or called. A few names have stand-ins here, and
any other is refused. Long values stay in the file: an array is its place there.
"""

import io
import math
import pickletools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from haiku_template.errors import ConfigError

# Opcodes whose argument is the value; of bytes, with the size of their length.
VALUES = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT"}
VALUES |= {"BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE"}
VALUES |= {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
BYTES = {"SHORT_BINBYTES": 1, "BINBYTES": 4, "BINBYTES8": 8, "BYTEARRAY8": 8}
NEW = {"NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False}
NEW |= {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
DAMAGE += (RecursionError, EOFError)
DTYPE = re.compile(r"b1|[iu][1248]|f[248]|c8|c16|[SU]\d{1,5}|bfloat16")
NAME = re.compile(r"[\w.<>]{1,200}")


class Place(NamedTuple):
    """Bytes of a file."""

    file: Path
    first: int
    size: int


@dataclass
class Array:
    """An array in a file; `dtype` None until it is known, and where it has none."""

    dtype: np.dtype | None = None
    shape: tuple[int, ...] = ()
    fortran: bool = False
    data: Place | bytes = b""
    axes: tuple[int, ...] = ()  # Of an array in C order, of which this is a transpose.

    @property
    def nbytes(self) -> int:
        """Bytes in C order."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Dtype:
    """A dtype to be told its byte order."""

    code: str
    order: str = "="


class Wrapper:
    """An array of joblib's, whose bytes follow in the file."""


@dataclass(frozen=True)
class Known:
    """A name that a pickle may hold, and its stand-in; None if it is never called."""

    name: str
    make: Callable[..., Any] | None = None


class Bounded(io.BufferedReader):
    """A file to read that refuses a length which it cannot have, before it is read."""

    def __init__(self, path: Path, first: int = 0) -> None:
        super().__init__(io.FileIO(path))
        self.path, self.size = path, path.stat().st_size
        self.seek(first)

    def read(self, size: int) -> bytes:
        """Reads exactly `size` bytes."""
        return super().read(self._fits(size))

    def skip(self, size: int) -> Place:
        """Steps over `size` bytes and returns their place."""
        place = Place(self.path, self.tell(), size)
        self.seek(self._fits(size), io.SEEK_CUR)
        return place

    def _fits(self, size: int) -> int:
        first = self.tell()
        if not 0 <= size <= self.size - first:
            raise ConfigError(
                f"it is truncated or damaged: at byte {first:,} it claims {size:,} "
                f"bytes, and {self.size - first:,} are left"
            )
        return size


def load(path: Path, first: int = 0) -> Any:
    """Reads the pickle that begins at byte `first` of a file.

    Returns:
      Containers, numbers and text; each array is an `Array`.

    Raises:
      ConfigError: it is damaged, or names anything that has no stand-in.
    """
    with Bounded(path, first) as file:
        try:
            return _load(file)
        except ConfigError:
            raise
        except DAMAGE as error:
            words = " ".join(str(error).split())[:80]
            raise ConfigError(
                f"it is no pickle, or a damaged one, at byte {file.tell():,}: "
                f"{words or type(error).__name__}"
            ) from error


def _load(file: Bounded) -> Any:
    stack, marks, memo = [], [], {}
    for name, argument in _opcodes(file):
        if name == "STOP":
            return stack.pop()
        _apply(name, argument, stack, marks, memo)
        if name == "BUILD":
            state = stack.pop()
            stack[-1] = _build(stack[-1], state, file)


def _opcodes(file: Bounded) -> Iterator[tuple[str, Any]]:
    while True:
        opcode = pickletools.code2op[file.read(1).decode("latin1")]
        if opcode.name in BYTES:
            size = int.from_bytes(file.read(BYTES[opcode.name]), "little")
            yield opcode.name, file.skip(size)
        else:
            yield opcode.name, opcode.arg and opcode.arg.reader(file)


def _apply(name: str, argument: Any, stack: list, marks: list, memo: dict) -> None:
    """Applies an opcode, but for STOP and BUILD, to the stack and the memo."""
    match name:
        case "PROTO" | "FRAME" | "BUILD":
            pass
        case _ if name in VALUES or name in BYTES:
            stack.append(argument)
        case _ if name in NEW:
            stack.append(NEW[name]())
        case "MARK":
            marks.append(len(stack))
        case "POP":
            stack.pop()
        case "POP_MARK":
            _cut(stack, marks.pop())
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            stack.append(tuple(_cut(stack, len(stack) - int(name[-1]))))
        case "TUPLE":
            stack.append(tuple(_cut(stack, marks.pop())))
        case "LIST":
            stack.append(_cut(stack, marks.pop()))
        case "DICT":
            stack.append(_set({}, _cut(stack, marks.pop())))
        case "APPEND" | "APPENDS":
            first = marks.pop() if name == "APPENDS" else len(stack) - 1
            list.extend(stack[first - 1], _cut(stack, first))
        case "SETITEM" | "SETITEMS":
            first = marks.pop() if name == "SETITEMS" else len(stack) - 2
            _set(stack[first - 1], _cut(stack, first))
        case "PUT" | "BINPUT" | "LONG_BINPUT":
            memo[argument] = stack[-1]
        case "MEMOIZE":
            memo[len(memo)] = stack[-1]
        case "GET" | "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "GLOBAL":
            stack.append(_known(*argument.split(" ", 1)))
        case "STACK_GLOBAL":
            stack.append(_known(*_cut(stack, len(stack) - 2)))
        case "REDUCE" | "NEWOBJ":
            function, arguments = _cut(stack, len(stack) - 2)
            if not isinstance(function, Known) or function.make is None:
                raise ConfigError(f"it calls {_words(function)}, which is refused")
            stack.append(function.make(*arguments))
        case "INST":
            raise ConfigError(f"it makes a {argument[:80]}, which is refused")
        case _:
            raise ValueError(f"opcode {name}")


def _cut(stack: list[Any], first: int) -> list[Any]:
    if not 0 <= first <= len(stack):
        raise ValueError("values are missing")
    items = stack[first:]
    del stack[first:]
    return items


def _set(target: Any, items: list[Any]) -> dict[Any, Any]:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if isinstance(key, tuple) and any(isinstance(part, tuple) for part in key):
            raise ConfigError("it names values by tuples of tuples, which is refused")
        dict.__setitem__(target, key, value)
    return target


def _known(module: Any, name: Any) -> Known:
    is_text = isinstance(module, str) and isinstance(name, str)
    found = KNOWN.get((module, name)) if is_text else None
    if found is None and not (is_text and NAME.fullmatch(f"{module}.{name}")):
        raise ValueError("a name is none")
    if found is None:
        raise ConfigError(
            f"it names {module}.{name}, and nothing but arrays, their dtypes, dicts, "
            "lists, tuples, text and numbers is read from a pickle; nothing was run. "
            "If you trust the file, load it where its code is installed, and save "
            "{module: {name: array}} of it by numpy.save"
        )
    return found


def _words(value: Any) -> str:
    return value.name if isinstance(value, Known) else f"a {type(value).__name__}"


def _build(target: Any, state: Any, file: Bounded) -> Any:
    """Gives `target` the state that a pickle holds for it."""
    if isinstance(target, Wrapper):
        return _wrapped(state, file)
    if isinstance(target, Dtype):
        if any(x is not None for x in state[2:5]):
            raise ConfigError("it holds an array with named fields, which is refused")
        target.order = state[1]
        return target
    if isinstance(target, Array):
        return _fill(target, *state[-4:])
    if isinstance(target, dict) and not state:
        return target
    raise ConfigError(f"it sets attributes of {_words(target)}, which is refused")


def _wrapped(state: dict[str, Any], file: Bounded) -> Any:
    """Finds the bytes of joblib's array: behind padding, if they are aligned."""
    if _is_object(state["dtype"]):
        return _load(file)
    if state.get("numpy_array_alignment_bytes") is not None:
        file.skip(file.read(1)[0])
    dtype, shape = _dtype(state["dtype"]), _shape(state["shape"])
    data = file.skip(math.prod(shape) * dtype.itemsize)
    return Array(dtype, shape, state["order"] == "F", data)


def _fill(array: Array, shape: Any, dtype: Any, fortran: Any, data: Any) -> Any:
    if _is_object(dtype):
        return data[0] if _shape(shape) in ((), (1,)) else data
    array.dtype, array.shape = _dtype(dtype), _shape(shape)
    array.fortran = bool(fortran)
    array.data = data.encode("latin1") if isinstance(data, str) else data
    size = data.size if isinstance(data, Place) else len(array.data)
    if size != array.nbytes:
        raise ConfigError(
            f"it claims an array {array.dtype}{list(array.shape)} of {array.nbytes:,} "
            f"bytes, and holds {size:,} of them"
        )
    return array


def _is_object(dtype: Dtype) -> bool:
    return dtype.code.lstrip("|").startswith("O")


def _dtype(dtype: Dtype) -> np.dtype:
    """The dtype of numbers or text; raises `ConfigError` for any other."""
    if not DTYPE.fullmatch(dtype.code):
        raise ConfigError(
            f"it holds an array of dtype {dtype.code[:40]}, not of numbers"
        )
    found = np.dtype(ml_dtypes.bfloat16 if dtype.code == "bfloat16" else dtype.code)
    return found.newbyteorder(dtype.order if dtype.order in "<>" else "=")


def _shape(shape: Any) -> tuple[int, ...]:
    if type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape):
        raise ConfigError(f"it claims an array of shape {str(shape)[:80]}")
    return shape


def _of_jax(make: Known, arguments: Any, state: Any, *_: Any) -> Any:
    del arguments
    if make is not KNOWN["numpy.core.multiarray", "_reconstruct"]:
        raise ConfigError(f"it makes a JAX array of {_words(make)}, which is refused")
    return _fill(Array(), *state[-4:])


def _of_buffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = ()) -> Array:
    array = _fill(Array(), shape, dtype, order == "F", data)
    if order == "K":
        array.axes, array.shape = axes, tuple(shape[i] for i in _shape(axes))
        if sorted(axes) != [*range(len(shape))]:
            raise ConfigError(f"it claims an array whose axes are {str(axes)[:80]}")
    return array


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ConfigError(f"it encodes text as {encoding[:40]}, which is refused")
    return text.encode("latin1")


def _make_dict(items: Any = ()) -> dict[Any, Any]:
    pairs = items.items() if isinstance(items, dict) else items
    return _set({}, [part for pair in pairs for part in pair])


def _make_dtype(code: Any, *_: Any) -> Dtype:
    return Dtype(code.name.split(".")[-1] if isinstance(code, Known) else str(code))


KNOWN = {
    ("numpy", "ndarray"): Known("numpy.ndarray"),
    ("numpy", "dtype"): Known("numpy.dtype", _make_dtype),
    ("_codecs", "encode"): Known("_codecs.encode", _encoded),
    ("collections", "OrderedDict"): Known("OrderedDict", _make_dict),
    # Haiku's own dictionary, of earlier versions.
    ("haiku._src.data_structures", "FlatMapping"): Known("FlatMapping", _make_dict),
    ("joblib.numpy_pickle", "NumpyArrayWrapper"): Known("joblib", Wrapper),
    ("jax._src.array", "_reconstruct_array"): Known("jax", _of_jax),
    ("jax._src.device_array", "reconstruct_device_array"): Known("jax", _of_jax),
}
_FUNCTIONS = {
    ("multiarray", "_reconstruct"): Known("numpy's array", lambda *_: Array()),
    ("multiarray", "scalar"): Known(
        "numpy's scalar", lambda dtype, data: _fill(Array(), (), dtype, False, data)
    ),
    ("numeric", "_frombuffer"): Known("numpy's array", _of_buffer),
}
for (_module, _name), _known_function in _FUNCTIONS.items():
    KNOWN[f"numpy.core.{_module}", _name] = _known_function
    KNOWN[f"numpy._core.{_module}", _name] = _known_function
for _module in ("builtins", "__builtin__"):  # Of earlier protocols, for no bytes.
    KNOWN[_module, "bytes"] = Known("bytes", lambda: b"")
for _module in ("ml_dtypes", "jaxlib.xla_extension"):
    KNOWN[_module, "bfloat16"] = Known("ml_dtypes.bfloat16")
for _name in ("bool_", "float16", "float32", "float64", "int8", "int32", "int64"):
    KNOWN["numpy", _name] = Known(f"numpy.{_name}")
