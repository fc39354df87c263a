"""Conversion of published pickles to safetensors, by a child process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from haiku_template import signals
from haiku_template.bounded import is_dir, is_file, parse
from haiku_template.errors import ConfigError, StorageError, download
from haiku_template.pretrained.writing import new_file


def convert(
    source: str | Path,
    output: str | Path,
    key: str | None = None,
    unreplicate: bool = False,
) -> dict[str, Any]:
    """Converts the parameters in a file of joblib's, a pickle, or one of NumPy's.

    Args:
      output: the new safetensors file: written whole or not at all.
      key: of the parameters in the file's tree, `a/b`; None for the only ones.
      unreplicate: takes the first replica of each array [devices, ...], of a state that
        was saved as `jax.pmap` has it.

    Returns:
      Numbers of `arrays`, `numbers` and `bytes`; the key `taken`, "" for the whole
      tree; and the keys `left` out.

    Raises:
      ConfigError: `output` exists, or the source is damaged, or calls anything but
        what makes arrays and containers: named, and not run; or replicas differ.
      StorageError: `output` cannot be written.
    """
    source, output = Path(source), Path(output)
    if not is_file(source) or not os.access(source, os.R_OK):
        as_it_is = "; config.init_from reads an Orbax tree as it is" * is_dir(source)
        raise ConfigError(
            f"--input={source} is no file that is there and may be read{as_it_is}"
            + download(source)
        )
    if output.suffix != ".safetensors":
        raise ConfigError(f"--output={output} must end in .safetensors")
    with new_file(output) as partial:
        child = subprocess.Popen(
            [sys.executable, "-m", "haiku_template.conversion", source, partial]
            + [key or "", str(unreplicate)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
        )
        with child, signals.called(lambda *_: child.kill()):
            output_text, errors = child.communicate()
        try:
            facts = parse(output_text)
        except ValueError:
            last = errors.strip().split("\n")[-1] or f"exit status {child.returncode}"
            facts = {"refused": f"the process that read it ended: {last}"}
        if "failed" in facts:
            raise StorageError(f"{output} cannot be written: {facts['failed']}")
        if "refused" in facts:
            raise ConfigError(
                f"{source} is not converted, and nothing is written: {facts['refused']}"
            )
    return facts
