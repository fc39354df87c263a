import json
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """The kernel `python3` is this interpreter, and its files are temporary."""
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "this Python",
        "language": "python",
    }
    folder = tmp_path / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


def files():
    """What lies where a notebook would write by mistake."""
    return {*NOTEBOOKS.iterdir(), *NOTEBOOKS.parent.iterdir()}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    "path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem
)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    before = files()
    nbclient.NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    ).execute()
    assert files() == before
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert outputs
    assert not [o for o in outputs if o.output_type == "error"]


def test_quickstart_is_stored_as_executed():
    notebook = nbformat.read(NOTEBOOKS / "quickstart.ipynb", as_version=4)
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join(output.get("text", "") for output in outputs)
    assert "largest difference" in text
    assert "cpu:0-3 whole on each" in text
