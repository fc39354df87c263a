"""Folders of Hugging Face's to read: the references, and changed copies of them."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

REFERENCES = Path(__file__).parent / "references"


@pytest.fixture
def references():
    return REFERENCES


@pytest.fixture
def copy_of(tmp_path):
    """Copies a reference folder, with changes to its config and to its tensors."""

    def copy(name, change=None, **config):
        folder = tmp_path / name
        shutil.copytree(REFERENCES / name, folder)
        if config:
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        if change:
            tensors = {}
            for file in sorted(folder.glob("*.safetensors")):
                tensors |= load_file(file)
                file.unlink()
            (folder / "model.safetensors.index.json").unlink(missing_ok=True)
            tensors = {k: np.ascontiguousarray(v) for k, v in change(tensors).items()}
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return copy


@pytest.fixture
def write_raw():
    """Writes a safetensors file byte by byte, whatever the header says."""

    def write(path, header, data=b"", size=None, align=8):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % align)
        size = len(text) if size is None else size
        path.write_bytes(struct.pack("<Q", size) + text + data)
        return path

    return write
