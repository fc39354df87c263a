"""ProteinMPNN as ColabDesign publishes it: its model, data and task for a config.

The model's own modules are imported from the unpacked wheel and used as they are. It
takes one structure at a time: `config.model.per_example` maps it over a batch.

Shapes: B structures in a batch, L residues, 4 atoms (N, CA, C, O) with 3 coordinates in
angstroms.
"""

from pathlib import Path

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_template import published
from haiku_template.data import BatchSpec, Data, bucketed
from haiku_template.errors import ConfigError
from haiku_template.training import Task

WEIGHT = "example_weight"
# In the order that the weights have; X is any other.
LETTERS = "ACDEFGHIKLMNPQRSTVWYX"
NAMES = (
    "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR"
)
ATOMS = ("N", "CA", "C", "O")


def model(
    num_outputs: int,
    axis_name: str | None,
    *,
    code: str,
    noise: float = 0.0,
    dropout: float = 0.0,
) -> hk.Transformed:
    """Logits [L, 21] of each residue, given those before it in the decoding order.

    Args:
      code: folder of the unpacked wheel.
      noise: standard deviation that training adds to the coordinates, in angstroms.
      dropout: share of dropped units in training.
    """
    del num_outputs, axis_name
    if not Path(code).is_dir():
        raise ConfigError(
            f"config.model.code={code} is no folder; try `make published`"
        )
    # Its packages import AlphaFold, and names that JAX removed.
    modules = published.import_module("colabdesign.mpnn.modules", code)

    def forward(structure: dict[str, jax.Array], is_training: bool) -> jax.Array:
        inputs = {k: v for k, v in structure.items() if k != "draw"}
        mask = inputs["mask"].astype(jnp.float32)
        # In training each step draws another order; padding comes last.
        draw = structure["draw"]
        if is_training:
            draw = jax.random.uniform(hk.next_rng_key(), draw.shape)
        inputs |= {"mask": mask, "decoding_order": jnp.argsort(draw + (1 - mask))}
        net = modules.ProteinMPNN(
            num_letters=21,
            node_features=128,
            edge_features=128,
            hidden_dim=128,
            k_neighbors=48,
            augment_eps=noise if is_training else 0.0,
            dropout=dropout if is_training else 0.0,
        )
        return net.score(inputs)["logits"]

    return hk.transform(forward)


def data(
    spec: BatchSpec,
    *,
    path: str,
    train: tuple[str, ...],
    held_out: tuple[str, ...],
    lengths: tuple[int, ...],
) -> Data:
    """Structures of PDB files in the folder `path`, padded to one of few lengths.

    Each has a name for `read`.
    """
    parts = [[read(path, name) for name in names] for names in (train, held_out)]
    return bucketed(parts[0], spec, lengths, evaluation=parts[1], mask="mask")


def read(path: str, name: str) -> dict[str, np.ndarray]:
    """Reads a chain from its ATOM records: `FILE:A`, or residues of it, `FILE:A:1-107`.

    A residue without its four atoms is left out. `X` is float32 [L, 4, 3], `S` int32
    [L] of `LETTERS`, `residue_idx` and `chain_idx` int32 [L]; `draw`, float32 [L],
    orders the decoding in evaluation.
    """
    file, chain, *residues = name.split(":")
    first, last = map(int, residues[0].split("-")) if residues else (-1000, 10_000)
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for line in (Path(path) / f"{file}.pdb").read_text().splitlines():
        if line[:4] != "ATOM" or line[21] != chain:
            continue
        atom, place = line[12:16].strip(), line[22:27]
        if atom in ATOMS and first <= int(place[:4]) <= last:
            atoms = found.setdefault((place, line[17:20]), {})
            # Of several positions the first.
            atoms.setdefault(atom, [float(line[i : i + 8]) for i in (30, 38, 46)])
    whole = {key: atoms for key, atoms in found.items() if len(atoms) == len(ATOMS)}
    if not whole:
        raise ConfigError(f"{path}/{file}.pdb has no residues of {name}")
    codes = {three: code for code, three in enumerate(NAMES.split())}
    letters = [codes.get(three, len(codes)) for _, three in whole]
    return {
        "X": np.array([[a[x] for x in ATOMS] for a in whole.values()], np.float32),
        "S": np.array(letters, np.int32),
        "residue_idx": np.array([int(place[:4]) for place, _ in whole], np.int32),
        "chain_idx": np.zeros(len(whole), np.int32),
        "draw": np.random.default_rng(0).uniform(size=len(whole)).astype(np.float32),
    }


def _values(logits: jax.Array, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    # [B, L]; the average is over residues, however long their structures are.
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["S"])
    right = jnp.argmax(logits, axis=-1) == batch["S"]
    weight = batch["mask"].astype(jnp.float32)
    return {"loss": loss, "recovery": right.astype(jnp.float32), WEIGHT: weight}


def _derive(averages: dict[str, float], counts: dict) -> dict[str, float]:
    return {"perplexity": float(np.exp(averages["loss"]))}


recovery = Task(_values, "any", derive=_derive)
