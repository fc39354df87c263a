"""What the documents say is true: their code runs, and prints what they show.

A document is one program: its Python blocks run in order in a child process. A block
without a language that follows one of them is what that one prints. After a change,
`python tests/test_docs.py` writes what is printed now into the documents.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    ROOT / "docs" / name
    for name in (
        "devices.md",
        "extend.md",
        "finetuning.md",
        "published_models.md",
        "workers.md",
    )
]
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:```\n(?P<output>.*?)```\n)?", re.S)
NEXT = "~~~ the next block ~~~"
COLOURS = ("FORCE_COLOR", "TTY_COMPATIBLE")  # They make rich colour what is piped.


def printed(document, folder):
    """What each Python block prints, without the spaces that rich puts at line ends."""
    blocks = [match["code"] for match in BLOCK.finditer(document.read_text())]
    env = {k: v for k, v in os.environ.items() if k not in COLOURS}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"\nprint({NEXT!r})\n".join(blocks)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=env | {"COLUMNS": "80", "PYTHONPATH": str(ROOT)},
        timeout=280,  # Slow machines: it ends one that hangs.
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return re.sub(r"(?m) +$", "", done.stdout).split(f"{NEXT}\n")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_code_prints_what_the_document_shows(document, tmp_path):
    shown = [match["output"] or "" for match in BLOCK.finditer(document.read_text())]
    for actual, expected in zip(printed(document, tmp_path), shown, strict=True):
        assert actual == expected


def update(document):
    with tempfile.TemporaryDirectory() as folder:
        outputs = iter(printed(document, folder))

    def block(match):
        output = next(outputs)
        shown = f"```\n{output}```\n" if output else ""
        return f"```python\n{match['code']}```\n{shown}"

    document.write_text(BLOCK.sub(block, document.read_text()))


if __name__ == "__main__":
    for document in DOCUMENTS:
        update(document)
