"""What two finished runs differ in: bits, metrics, files."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp


def files_of(workdir):
    """Files of a workdir, but for TensorBoard's."""
    files = [x for x in workdir.rglob("*") if x.is_file()]
    return [x for x in files if "tensorboard" not in x.parts]


def compared(workdir, reference):
    """Sentences on what differs in two finished runs: bits, metrics, files."""
    faults, ends = [], []
    for folder in (workdir, reference):
        step = max(
            int(x.name) for x in (folder / "checkpoints").iterdir() if x.name.isdigit()
        )
        ends.append((step, leaves_of(folder / "checkpoints" / str(step) / "state")))
    (step, leaves), (wanted_step, wanted) = ends
    if step != wanted_step:
        faults.append(f"ended at step {step}, not {wanted_step}")
    elif leaves != wanted:
        other = [x for x in wanted if leaves.get(x) != wanted[x]]
        faults.append(
            f"other bits in {len(other)} of {len(wanted)} leaves: {other[:4]}"
        )
    rows, wanted = rows_of(workdir), rows_of(reference)
    for key in sorted(rows.keys() | wanted.keys()):
        if rows.get(key) != wanted.get(key):
            faults.append(f"metrics of {key}: {rows.get(key)}, not {wanted.get(key)}")
    names = {x.name for x in workdir.iterdir()} - {x.name for x in reference.iterdir()}
    names -= {x for x in names if ".damaged" in x} | {"confusion.png"}
    if names:
        faults.append(f"left over: {sorted(names)}")
    return faults[:8]


def leaves_of(folder):
    """Bits of each leaf of a saved state, read by Orbax."""
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(folder).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), tree)
        state = reader.restore(folder, restore_args=kinds)
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(k): (x.dtype, x.tobytes()) for k, x in leaves}


def rows_of(workdir):
    """Rows of metrics by step and kind, without those of speed; no step has two."""
    rows = {}
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        row = {k: x for k, x in row.items() if not k.startswith("perf/")}
        kind = next((x.split("/")[0] for x in row), "perf")
        rows.setdefault((step, kind), []).append(row)
    return rows
