"""Lists the commands: `python -m haiku_template`."""

import ast
from pathlib import Path

if __name__ == "__main__":
    for file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        if "\nif __name__ ==" in (text := file.read_text()):
            first = ast.get_docstring(ast.parse(text)).split("\n")[0]
            print(f"python -m haiku_template.{file.stem:<9} {first}")
