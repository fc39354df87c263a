"""Starts a project of yours, which depends on this package as it is installed.

    python -m haiku_template.new my_project [--dest=DIR] [--eject=loop] [--vendor]

`make new` in a clone is the same. `--eject=loop` copies the loop and the mathematics of
a step, to be changed; `--vendor`, in a clone, puts a wheel into the project.
`--notebooks=DIR`, alone, copies the notebooks. Exit codes: 0 done, 64 the name or the
folder cannot be used, or it is not known what to depend on; nothing was written.
"""

if __name__ == "__main__":
    from haiku_template import signals

    signals.install()

import os
import runpy
import shutil
import sys
from pathlib import Path

from haiku_template import shipped, signals
from haiku_template.bounded import exists


def main(words: list[str]) -> int:
    """Makes the project, or copies the notebooks; returns the exit code."""
    joined: list[str] = []
    for word in words:  # `--dest DIR` is `--dest=DIR`.
        is_value = bool(joined) and not word.startswith("-")
        if is_value and joined[-1] in ("--dest", "--eject", "--name", "--notebooks"):
            word = f"{joined.pop()}={word}"
        joined.append(word)
    name = next((word for word in joined if not word.startswith("-")), None)
    copies = [x.partition("=")[2] for x in joined if x.startswith("--notebooks=")]
    copies = [os.path.expanduser(x) for x in copies]
    if copies and (not copies[0] or len(joined) > 1):
        return _refuse("--notebooks=DIR takes no other words: a project is made apart")
    if (home := shipped.folder("notebooks" if copies else "skeleton")) is None:
        return _refuse("this installation has neither notebooks nor a skeleton")
    if copies:
        if exists(copies[0]):
            return _refuse(f"{copies[0]} exists, and nothing is overwritten")
        partial = Path(copies[0]).with_name(f"{Path(copies[0]).name}.{os.getpid()}")
        try:
            shutil.copytree(home, partial)
            partial.rename(copies[0])
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            return _refuse(f"{copies[0]} cannot be written: {error}")
        print(f"{copies[0]}: {len(list(home.glob('*.ipynb')))} notebooks")
        return 0
    if name is not None:
        joined.remove(name)  # The first: one more is refused.
        is_elsewhere = any(x.startswith("--dest") for x in joined)
        joined = [f"--name={name}", *[f"--dest={name}"] * (not is_elsewhere), *joined]
    return runpy.run_path(str(home / "new.py"))["main"](joined)


def _refuse(sentence: str) -> int:
    signals.say(f"error: {sentence}")
    return 64


if __name__ == "__main__":
    with signals.closed_pipes():
        sys.exit(main(sys.argv[1:]))
