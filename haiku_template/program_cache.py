"""JAX's persistent cache of compiled programs, in the user's cache folder.

Commands use it unless JAX was told otherwise: by JAX_COMPILATION_CACHE_DIR, which names
another folder, or by JAX_ENABLE_COMPILATION_CACHE=0.
"""

import contextlib
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from haiku_template.bounded import is_dir

LARGEST = 2**30  # Bytes of all files.
MOST = 2000  # Files: each start looks at all of them.
SECONDS = "jax_persistent_cache_min_compile_time_secs"


def use() -> None:
    """Keeps the programs of this process, if it can; before the first is compiled."""
    import jax

    _write_at_once()
    has_folder = jax.config.jax_compilation_cache_dir is not None
    if has_folder or not jax.config.jax_enable_compilation_cache:
        return
    # What is not compiled is not dumped.
    if "xla_dump" in os.environ.get("XLA_FLAGS", "") or (folder := _folder()) is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if SECONDS.upper() not in os.environ:
        # A start has a dozen programs, most of them faster than JAX's one second.
        jax.config.update(SECONDS, 0.0)


def _write_at_once() -> None:  # Why: docs/decisions/patches.md#cache-entries
    """Lets JAX rename entries into its cache: a killed process leaves none in part."""
    try:
        from jax._src.lru_cache import LRUCache

        put = LRUCache.put
    except (ImportError, AttributeError):
        return  # A JAX without the name writes as it does.
    if hasattr(put, "__wrapped__"):  # Also before this module was reloaded.
        return

    @functools.wraps(put)
    def put_at_once(cache: Any, key: str, value: bytes) -> None:
        if cache.eviction_enabled or not os.path.isdir(cache.path):
            return put(cache, key, value)  # Under a lock, or not of this machine.
        with tempfile.TemporaryDirectory(prefix="new-", dir=cache.path) as folder:
            put(LRUCache(folder, max_size=-1), key, value)  # It evicts nothing.
            for name in os.listdir(folder):
                os.replace(os.path.join(folder, name), os.path.join(cache.path, name))

    LRUCache.put = put_at_once


def _folder() -> Path | None:  # Why: docs/decisions/devices.md#program-cache
    """Makes the folder and removes what is too much in it; None if it cannot be had."""
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(caches).absolute() / "haiku_template" / "programs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        # Programs are code: not from a folder that others write.
        private = facts.st_uid == os.getuid() and not facts.st_mode & 0o022
        # On a full disk JAX leaves half a file, and warns of it for ever.
        room = shutil.disk_usage(folder).free > LARGEST
        if not (private and room and os.access(folder, os.W_OK)):
            return None
        prune(folder, LARGEST, MOST)
    except (OSError, RuntimeError):  # Read-only; or no home.
        return None
    return folder


def prune(folder: Path, largest: int, most: int) -> None:
    """Removes the files read longest ago, beyond so many bytes or files."""
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # Another process removed it.
            if not is_dir(path):
                facts = path.stat()
                files.append((max(facts.st_atime, facts.st_mtime), facts.st_size, path))
    total = 0
    for number, (_, size, path) in enumerate(sorted(files, reverse=True), 1):
        total += size
        if total > largest or number > most:
            path.unlink(missing_ok=True)
