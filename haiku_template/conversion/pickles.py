"""Pickles, read by the standard library's unpickler with nothing but arrays in reach.

A name is looked up in a table of stand-ins and never imported; an opcode that is not in
another table is refused. Of an object of any other class its fields are read, and a
call of any other name is refused. Long values stay in the file: an array is a view of
its map.
"""

import functools
import math
import mmap

# Why: docs/decisions/finetuning.md#unpickler
import pickle
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from haiku_template.errors import ConfigError

# Opcodes that the standard library may apply: they make values, containers and memos,
# and look up names. `Reader` has those that call, set or take long bytes.
OPCODES = """
    PROTO STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG
    LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE
    SHORT_BINUNICODE BINUNICODE8 SHORT_BINBYTES EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_LIST LIST APPEND APPENDS SETITEM SETITEMS PUT BINPUT LONG_BINPUT MEMOIZE GET
    BINGET LONG_BINGET GLOBAL STACK_GLOBAL
"""
DAMAGE = (pickle.UnpicklingError, LookupError, TypeError, ValueError, AttributeError)
DAMAGE += (ArithmeticError, RecursionError)
DTYPE = re.compile(r"b1|[iu][1248]|f[248]|c8|c16|[SU]\d{1,5}|bfloat16")
NAME = re.compile(r"[\w.<>]{1,200}")


class Dict(dict):
    """Dictionary that refuses keys whose hash may take forever."""

    def __setitem__(self, key: Any, value: Any) -> None:
        # A tuple may hold another twice, and this one a third, and so on.
        if isinstance(key, tuple) and any(isinstance(x, tuple) for x in key):
            raise ConfigError("it names values by tuples of tuples, which is refused")
        super().__setitem__(key, value)


class Name(str):
    """Name that has no stand-in: a class of objects; a call of it is refused."""

    fields: tuple[str, ...] = ()  # Of a named tuple, where the file says them.

    @classmethod
    def create(cls, module: str, name: str) -> "Name":
        """Joins what a file names, in a length that messages can show."""
        if not NAME.fullmatch(f"{module}.{name}"):
            raise ValueError("a name is none")
        return cls(f"{module}.{name}")


class Object(Dict):
    """Stand-in of an object: fields by name, and most tuples' by their places."""

    def __init__(self, of: Name, values: tuple[Any, ...] = ()) -> None:
        names = of.fields or map(str, range(len(values)))
        super().__init__(zip(names, values, strict=True))
        self.of = of

    def build(self, state: Any) -> None:
        """Takes attributes: a dictionary, or a pair of one and those of slots."""
        for fields in state if isinstance(state, tuple) else (state,):
            # Of pairs the keys would be hashed, whatever they are.
            if not isinstance(fields, dict | None):
                values = _describe(fields)
                raise ConfigError(f"{_describe(self)} has {values} for its attributes")
            self |= fields or {}


class Array:
    """Stand-in of an array; `values` are None until the pickle sets them."""

    values: np.ndarray | None = None


class Wrapper(Array):
    """Stand-in of joblib's arrays, whose bytes follow in the file."""


class Dtype:
    """Stand-in of a dtype, whose byte order a pickle sets later."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code, self.order = code, "="

    @property
    def is_object(self) -> bool:
        """Tests for an array of Python objects."""
        return self.code.lstrip("|").startswith("O")

    def resolve(self) -> np.dtype:
        """The dtype of numbers or text; raises `ConfigError` for any other."""
        if not DTYPE.fullmatch(self.code):
            raise ConfigError(
                f"it holds an array of dtype {self.code[:40]}, not of numbers"
            )
        dtype = np.dtype(ml_dtypes.bfloat16 if self.code == "bfloat16" else self.code)
        return dtype.newbyteorder(self.order if self.order in "<>" else "=")


class MappedFile:
    """Mapped file that refuses to read beyond its end."""

    def __init__(self, path: Path, place: int = 0) -> None:
        self.map = b""
        if path.stat().st_size:  # An empty file cannot be mapped.
            with path.open("rb") as file:
                try:
                    self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                except OSError as error:  # The limit counts maps, too.
                    raise MemoryError from error
        self.data, self.place = memoryview(self.map), place

    def view(self, size: int) -> memoryview:
        """Steps over `size` bytes, and maps them."""
        remaining = len(self.data) - self.place
        if not 0 <= size <= remaining:
            raise ConfigError(
                f"it is truncated or damaged: at byte {self.place:,} it claims "
                f"{size:,} bytes, and {remaining:,} are left"
            )
        self.place += size
        return self.data[self.place - size : self.place]

    def remainder(self) -> memoryview:
        """Maps all that is left."""
        return self.view(len(self.data) - self.place)

    def read(self, size: int) -> bytes:
        """Reads exactly `size` bytes."""
        return bytes(self.view(size))

    def readline(self) -> bytes:
        """Reads to the end of a line."""
        end = self.map.find(b"\n", self.place) + 1
        return self.read(end - self.place if end else len(self.data))


class Reader(pickle._Unpickler):
    """Unpickler of arrays, dictionaries, lists, tuples, objects, text and numbers.

    It is Python's, not C's: lengths are asked of the file before memory is taken, and
    opcodes are a table.
    """

    def __init__(self, file: MappedFile) -> None:
        super().__init__(file, encoding="latin1")
        self.file = file

    def find_class(self, module: str, name: str) -> Any:
        """Looks up a stand-in; nothing is imported."""
        if (module, name) in NAMES:
            return NAMES[module, name]
        of = Name.create(module, name)
        if module == "ml_dtypes":  # float8, int4.
            raise _nothing_else(f"it names {of}", " as float32")
        return of

    def _view_bytes(self, width: int = 8) -> None:
        self.append(self.file.view(int.from_bytes(self.read(width), "little")))

    def _make_dict(self) -> None:
        items = self.pop_mark()
        self.append(_of_pairs(zip(items[::2], items[1::2], strict=True)))

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if isinstance(function, Name):
            raise _nothing_else(f"it names {function}")
        if not callable(function):  # Stand-ins alone are.
            raise ConfigError(f"it calls {_describe(function)}, which is refused")
        self.append(function(*arguments))

    def _make_object(self) -> None:
        if not isinstance(self.stack[-2], Name):
            return self._call()
        values, of = self.stack.pop(), self.stack.pop()
        self.append(Object(of, values))

    def _build(self) -> None:
        # The library would set any attribute, also of functions.
        state, target = self.stack.pop(), self.stack.pop()
        if isinstance(target, Wrapper):
            target = self._read_wrapped(target, state)
        elif isinstance(target, Array):
            target = _fill(target, *state[-4:])
        elif isinstance(target, Dtype):
            if any(x is not None for x in state[2:5]):
                raise ConfigError("it holds an array with named fields: refused")
            target.order = state[1]
        elif isinstance(target, Object):
            target.build(state)
        elif not isinstance(target, dict) or state:
            raise ConfigError(
                f"it sets attributes of {_describe(target)}, which is refused"
            )
        self.append(target)

    def _read_wrapped(self, array: Wrapper, state: dict[str, Any]) -> Any:
        """Reads what follows in a joblib file: bytes, or a pickle of objects."""
        if state["dtype"].is_object:
            return Reader(self.file).load()
        if state.get("numpy_array_alignment_bytes") is not None:
            self.file.view(self.read(1)[0])  # Padding.
        shape, dtype = state["shape"], state["dtype"].resolve()
        data = self.file.view(math.prod(shape) * dtype.itemsize)
        array.values = make_array(shape, dtype, state["order"] == "F", data)
        return array

    def _refuse(self) -> None:
        opcode = self.file.data[self.file.place - 1]
        if opcode in b"\x8f\x90\x91":
            raise _nothing_else("it holds a set")
        raise ValueError(f"the opcode {opcode:#x} is not read here")

    dispatch = dict.fromkeys(range(256), _refuse)
    for _name in OPCODES.split():
        _code = getattr(pickle, _name)[0]
        dispatch[_code] = pickle._Unpickler.dispatch[_code]
    dispatch[pickle.FRAME[0]] = lambda self: self.read(8)  # Its length, not needed.
    dispatch[pickle.BINBYTES[0]] = functools.partial(_view_bytes, width=4)
    dispatch[pickle.BINBYTES8[0]] = dispatch[pickle.BYTEARRAY8[0]] = _view_bytes
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(Dict())
    dispatch[pickle.DICT[0]] = _make_dict
    dispatch[pickle.REDUCE[0]] = _call
    dispatch[pickle.NEWOBJ[0]] = _make_object
    dispatch[pickle.BUILD[0]] = _build


def _nothing_else(subject: str, of: str = "") -> ConfigError:
    return ConfigError(
        f"{subject}, and nothing but arrays, their dtypes, dicts, lists, tuples, text "
        "and numbers is read from a pickle; nothing was run. If you trust the file, "
        "load it where its code is installed, and save {module: {name: array}} of it"
        f"{of} by numpy.save"
    )


def load(path: Path, place: int = 0) -> Any:
    """Reads the pickle that begins at byte `place` of a file.

    Returns:
      Containers, numbers and text; each array is an `Array`. Of several pickles, one
      after another, it is a list.

    Raises `ConfigError` if it is damaged, or calls anything that has no stand-in.
    """
    file = MappedFile(path, place)
    try:
        trees = [Reader(file).load()]
        while file.data[file.place : file.place + 1] == pickle.PROTO:
            trees.append(Reader(file).load())
        return trees if len(trees) > 1 else trees[0]
    except ConfigError:
        raise
    except DAMAGE as error:
        reason = " ".join(str(error).split())[:80] or type(error).__name__
        raise ConfigError(
            f"it is no pickle, or a damaged one, at byte {file.place:,}: {reason}"
        ) from error


def make_array(shape: Any, dtype: np.dtype, is_fortran: bool, data: Any) -> np.ndarray:
    """Makes an array of bytes that stay; raises `ConfigError` if they do not fit."""
    if type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape):
        raise ConfigError(f"it claims an array of shape {reprlib.repr(shape)[:80]}")
    size = math.prod(shape) * dtype.itemsize
    if size != len(data):
        raise ConfigError(
            f"it is truncated or damaged: it claims an array {dtype}{list(shape)} of "
            f"{size:,} bytes, and holds {len(data):,} of them"
        )
    return np.ndarray(shape, dtype, data, order="F" if is_fortran else "C")


def _describe(value: Any) -> str:
    if isinstance(value, Object):
        return f"an object of {value.of}"
    return value[:80] if isinstance(value, str) else f"a {type(value).__name__}"


def _fill(array: Array, shape: Any, dtype: Dtype, is_fortran: Any, data: Any) -> Any:
    """Sets the values of an array; of objects, returns them instead."""
    if dtype.is_object:
        return data[0] if shape in ((), (1,)) else data
    data = data.encode("latin1") if isinstance(data, str) else data
    array.values = make_array(shape, dtype.resolve(), bool(is_fortran), data)
    return array


def _new_array(*_: Any) -> Array:
    return Array()


def _of_buffer(data: Any, dtype: Dtype, shape: Any, order: Any, axes: Any = ()) -> Any:
    array = _fill(Array(), shape, dtype, order == "F", data)
    if order == "K":
        if sorted(axes) != [*range(len(shape))]:
            raise ConfigError(f"it claims an array whose axes are {reprlib.repr(axes)}")
        array.values = array.values.transpose(axes)
    return array


def _reconstructed(function: Any, arguments: Any, state: Any, *_: Any) -> Any:
    del arguments
    if function is not _new_array:
        raise ConfigError(f"it makes an array of {_describe(function)}: refused")
    return _fill(Array(), *state[-4:])


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ConfigError(f"it encodes text as {encoding[:40]}, which is refused")
    return text.encode("latin1")


def _of_pairs(pairs: Any = ()) -> Dict:
    items = Dict()
    for key, value in pairs.items() if isinstance(pairs, dict) else pairs:
        items[key] = value
    return items


def _of_base(of: Any, base: Any, values: Any) -> Object:
    """Makes an object as protocols 0 and 1 have it: a tuple's values, or none."""
    if not isinstance(of, Name):
        raise ConfigError(f"it makes an object of {_describe(of)}, which is refused")
    return Object(of, values or ())


def _named_tuple(title: str, fields: tuple[str, ...], module: str, *_: Any) -> Name:
    of = Name.create(module, title)
    of.fields = tuple("".join(field) for field in fields)  # Text, or an error.
    return of


# Names that a pickle may hold, and their stand-ins; text is never called.
NAMES: dict[tuple[str, str], str | Callable[..., Any]] = {
    ("numpy", "ndarray"): "numpy.ndarray",
    ("numpy", "dtype"): Dtype,
    ("_codecs", "encode"): _encode,
    ("copy_reg", "_reconstructor"): _of_base,
    ("copyreg", "_reconstructor"): _of_base,
    ("builtins", "bytes"): lambda: b"",  # Of earlier protocols.
    ("__builtin__", "bytes"): lambda: b"",
    ("collections", "OrderedDict"): _of_pairs,
    # Haiku's own dictionary, of earlier versions.
    ("haiku._src.data_structures", "FlatMapping"): _of_pairs,
    ("joblib.numpy_pickle", "NumpyArrayWrapper"): Wrapper,
    ("jax._src.array", "_reconstruct_array"): _reconstructed,
    ("jax._src.device_array", "reconstruct_device_array"): _reconstructed,
    ("ml_dtypes", "bfloat16"): "bfloat16",
    ("jaxlib.xla_extension", "bfloat16"): "bfloat16",
}
for _dill in ("dill._dill", "dill.dill"):
    NAMES[_dill, "_create_array"] = _reconstructed
    NAMES[_dill, "_create_namedtuple"] = _named_tuple
for _core in ("numpy.core", "numpy._core"):
    NAMES[f"{_core}.multiarray", "_reconstruct"] = _new_array
    NAMES[f"{_core}.multiarray", "scalar"] = lambda dtype, data: _fill(
        Array(), (), dtype, False, data
    )
    NAMES[f"{_core}.numeric", "_frombuffer"] = _of_buffer
for _name in ("bool_", "float16", "float32", "float64", "int8", "int32", "int64"):
    NAMES["numpy", _name] = f"numpy.{_name}"
