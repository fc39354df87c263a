"""Takes each mend out, one at a time, and shows that its test fails without it.

    python -m tests.mends [--only=WORD] [--jobs=2]

In a copy of the tree, with an environment of its own that imports it, so that the
processes which tests start run the copy, too. Exits with 1 if a test passes without its
mend, or ends otherwise than by a failure.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mends import Mend, mends

ROOT = Path(__file__).parents[2]
SECONDS = 900


def copy_of_the_tree(folder: Path) -> Path:
    """Copies what git knows, and makes `folder/venv` import it; returns the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "tree" / name)
    subprocess.run(["git", "init", "-q"], cwd=folder / "tree", check=True)
    subprocess.run(["git", "add", "-A"], cwd=folder / "tree", check=True)
    venv.create(folder / "venv")
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    paths = f"{folder / 'tree'}\n{sysconfig.get_path('purelib')}\n"
    (site / "tree.pth").write_text(paths)
    return folder / "tree"


def fails_without(mend: Mend, folder: Path) -> str:
    """Runs the test of a mend without it: `failed: ...`, `PASSED` or `ENDED: ...`."""
    file = folder / "tree" / mend.file
    text = file.read_text()
    file.write_text(text.replace(mend.code, mend.without))
    python = str(folder / "venv" / "bin" / "python")
    command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mend.test]
    environment = os.environ | {"VIRTUAL_ENV": str(folder / "venv")}
    try:
        run = subprocess.run(
            command,
            cwd=folder / "tree",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"ENDED: not within {SECONDS} s"
    finally:
        file.write_text(text)
    if run.returncode == 1 and " failed" in run.stdout:
        errors = [x[2:].strip() for x in run.stdout.splitlines() if x.startswith("E ")]
        return f"failed: {errors[0][:100] if errors else ''}"
    if run.returncode == 0:
        return "PASSED"
    return f"ENDED: {run.returncode} {(run.stdout + run.stderr)[-300:]}"


def main() -> int:
    """Prints one line for each mend, and how many tests failed without theirs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="in the fault, file or test")
    parser.add_argument("--jobs", type=int, default=2)
    flags = parser.parse_args()
    chosen = [m for m in mends() if flags.only in f"{m.fault} {m.file} {m.test}"]
    folders: queue.Queue[Path] = queue.Queue()

    def check(mend: Mend) -> bool:
        folder, begun = folders.get(), time.monotonic()
        try:
            verdict = fails_without(mend, folder)
        finally:
            folders.put(folder)
        seconds = time.monotonic() - begun
        print(f"{seconds:4.0f} s  {mend.fault}\n        {mend.test}\n        {verdict}")
        sys.stdout.flush()
        return verdict.startswith("failed")

    with tempfile.TemporaryDirectory(prefix="mends-") as scratch:
        for n in range(flags.jobs):
            copy_of_the_tree(Path(scratch) / str(n))
            folders.put(Path(scratch) / str(n))
        with ThreadPoolExecutor(flags.jobs) as pool:
            results = list(pool.map(check, chosen))
    print(f"{sum(results)} of {len(results)} tests failed without their mends")
    return 0 if all(results) and results else 1


if __name__ == "__main__":
    sys.exit(main())
