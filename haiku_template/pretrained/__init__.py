"""Pretrained parameters in files of others: safetensors in Hugging Face's names."""

from haiku_template.pretrained.folder import (
    CONFIG,
    Description,
    describe,
    to_config,
)
from haiku_template.pretrained.reading import read, restore
from haiku_template.pretrained.writing import (
    Shard,
    check_new,
    export_like,
    export_new,
    new_file,
    new_folder,
    to_json,
    write_folder,
)

__all__ = [
    "CONFIG",
    "Description",
    "Shard",
    "check_new",
    "describe",
    "export_like",
    "export_new",
    "new_file",
    "new_folder",
    "read",
    "restore",
    "to_config",
    "to_json",
    "write_folder",
]
