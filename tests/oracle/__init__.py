"""An independent oracle of whole runs: random cases, by the template and without it.

`plain.py` trains a case with Haiku, optax and NumPy, as the documentation says it;
`template.py` by the template; `compare.py` tells where they disagree. `python -m
tests.oracle 0 100` tries the seeds from 0 to 99.
"""
