"""Lists the commands: `python -m haiku_template`."""

import ast
from pathlib import Path

if __name__ == "__main__":
    folder = Path(__file__).parent
    for file in [*sorted(folder.glob("[a-z]*.py")), folder / "doctor/__main__.py"]:
        if "\nif __name__ ==" in (text := file.read_text()):
            name = file.stem if file.parent == folder else "doctor"
            first = ast.get_docstring(ast.parse(text)).split("\n")[0]
            print(f"python -m haiku_template.{name:<9} {first}")
