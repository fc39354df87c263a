"""Lists the commands: `python -m haiku_template`."""

import ast
from pathlib import Path

from haiku_template import signals

if __name__ == "__main__":
    folder = Path(__file__).parent
    files = {file.stem: file for file in folder.glob("[a-z]*.py")}
    files["runs"] = folder / "runs" / "__main__.py"
    with signals.closed_pipes():
        for name, file in sorted(files.items()):
            if "\nif __name__ ==" in (text := file.read_text()):
                first = ast.get_docstring(ast.parse(text)).split("\n")[0]
                print(f"python -m haiku_template.{name:<11} {first}")
