"""Streams of tokens and token files, for the tests beside this file."""

import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from haiku_template.data import BatchSpec
from haiku_template.errors import ConfigError
from haiku_text.data import tokens as token_data
from haiku_text.data.stream import Shard, TokenStream

TOKENS = np.random.default_rng(0).integers(1000, size=997).astype(np.uint16)


def stream_of(*arrays):
    shards = [Shard(np.asarray(a), f"shard {i}") for i, a in enumerate(arrays)]
    return TokenStream(shards)


def counting(size, dtype=np.uint16):
    return stream_of(np.arange(size, dtype=dtype))


def write(path, tokens=TOKENS):
    """Writes tokens in the format that the name says."""
    if path.suffix == ".safetensors":
        save_file({"anything": tokens, "more": np.ones((2, 2), np.float32)}, path)
    elif path.suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    return path


def load(path, **keys):
    keys = {"path": str(path), "vocab_size": 1000} | keys
    return token_data(BatchSpec(4), **keys)


def refuses(*words):
    """Expects one line that says all `words`, in this order."""
    pattern = ".*".join(re.escape(str(word)) for word in words)
    return pytest.raises(ConfigError, match=f"^[^\\n]*{pattern}[^\\n]*$")
