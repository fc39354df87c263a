"""The notebooks run. What `devices.ipynb` stores is what it prints: after a change,
`python tests/test_notebooks.py` executes it, or those it names, and stores the outputs.
"""

import copy
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
DEVICES = NOTEBOOKS / "devices.ipynb"
FETCHED = NOTEBOOKS / "published_model.ipynb"  # Needs what `make published` fetches.


def kernel_variables(folder):
    """With these, the kernel `python3` is this interpreter, and its files go here."""
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "this Python",
        "language": "python",
    }
    kernel = folder / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(json.dumps(spec))
    return {
        "JUPYTER_PATH": str(folder / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
    }


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))  # Reports are drawn.
    for name, value in kernel_variables(tmp_path).items():
        monkeypatch.setenv(name, value)


def files():
    """What lies where a notebook would write by mistake."""
    return {*NOTEBOOKS.iterdir(), *NOTEBOOKS.parent.iterdir()}


def execute(notebook):
    nbclient.NotebookClient(
        notebook,
        timeout=900,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    ).execute()


def outputs(notebook):
    return [o for cell in notebook.cells for o in cell.get("outputs", [])]


def printed(notebook):
    """What each cell prints; how its text is cut into outputs depends on the time."""
    return [
        "".join(o.get("text") or o.data["text/plain"] for o in cell.get("outputs", []))
        for cell in notebook.cells
    ]


def marked(path):
    mark = pytest.mark.published if path == FETCHED else pytest.mark.slow
    return pytest.param(path, marks=mark, id=path.stem)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("path", [*map(marked, sorted(NOTEBOOKS.glob("*.ipynb")))])
def test_notebook_runs(path):
    stored = nbformat.read(path, as_version=4)
    notebook = copy.deepcopy(stored)
    before = files()
    execute(notebook)
    assert files() == before
    assert outputs(notebook)
    assert not [o for o in outputs(notebook) if o.output_type == "error"]
    if path == DEVICES:
        assert printed(stored) == printed(notebook)


@pytest.mark.parametrize(
    "path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda x: x.stem
)
def test_notebooks_hide_nothing_and_show_a_picture(path):
    notebook = nbformat.read(path, as_version=4)
    source = "".join(cell.source for cell in notebook.cells)
    assert "capture_output" not in source
    if path == DEVICES:  # The picture is rich's, of colored text.
        assert "visualize_array_sharding" in source
        return
    kinds = [kind for output in outputs(notebook) for kind in output.get("data", {})]
    assert "image/png" in kinds


def test_notebooks_begin_with_the_cell_for_colab():
    cells = []
    for path in set(NOTEBOOKS.glob("*.ipynb")) - {FETCHED, DEVICES}:
        notebook = nbformat.read(path, as_version=4)
        cell = next(x for x in notebook.cells if x.cell_type == "code").source
        cells.append(re.sub(r"\[[a-z,]+\] @", "[EXTRAS] @", cell))
    assert len(cells) == 4 and len(set(cells)) == 1 and "%pip install" in cells[0]


def test_the_published_model_begins_with_a_clone_and_what_it_fetches():
    """What the cell does is run by tests/test_shipped.py."""
    notebook = nbformat.read(FETCHED, as_version=4)
    cell = next(x for x in notebook.cells if x.cell_type == "code").source
    assert "!git clone" in cell and "%pip install" in cell and "fetch.sh" in cell
    script = re.search(r"!(\S+/fetch\.sh)", cell)[1]
    assert os.access(NOTEBOOKS.parent / script, os.X_OK)


def test_quickstart_is_stored_as_executed():
    notebook = nbformat.read(NOTEBOOKS / "quickstart.ipynb", as_version=4)
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    text = "".join(output.get("text", "") for output in outputs(notebook))
    assert "largest difference" in text
    assert "cpu:0-3 replicated" in text


def test_the_published_model_is_stored_as_executed():
    notebook = nbformat.read(FETCHED, as_version=4)
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    text = "".join(output.get("text", "") for output in outputs(notebook))
    assert "1FSK:A:1-107" in text and "cpu:0-3 replicated" in text


def update(path):
    notebook = nbformat.read(path, as_version=4)
    metadata = copy.deepcopy(notebook.metadata)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= kernel_variables(Path(folder))
        execute(notebook)
    notebook.metadata = metadata  # Not the version of this Python.
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or [DEVICES]):
        update(path)
