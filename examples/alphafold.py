"""AlphaFold 2's loss, as DeepMind's code computes it: config, model and data.

    make published
    python -m haiku_template.train --config=examples/alphafold.py --workdir=runs/af

A small one from the seed; without `blocks` and `channels`, and with config.init_from =
"params_model_3.npz", it is the published one, which needs a GPU. The package index has
that code as `alphafold` 2.0.0, whose modules are imported as they are. Its published
pipeline makes features for inference; `structure` makes those that its loss asks for,
of the positions of atoms, with its own functions.

Shapes: R recycled calls, of which each is a draw of the alignment, L residues, S rows
of it, 37 atoms of any residue and 14 of one kind.
"""

import collections
import collections.abc
import contextlib
import functools
from pathlib import Path
from types import SimpleNamespace

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import config_dict

from haiku_template import published
from haiku_template.config import default_config
from haiku_template.data import BatchSpec, Data, bucketed
from haiku_template.errors import ConfigError

FILES = "build/published"
CHANNELS = ("msa", "extra_msa", "pair", "seq")


def get_config() -> config_dict.ConfigDict:
    """Configures the experiment: the first residues of a few chains."""
    config = default_config()
    config.num_steps, config.batch_size, config.log_every = 4, 1, 1
    config.compat = True
    config.model = {
        "name": "examples.alphafold:model",
        "code": FILES,
        "per_example": True,
        "blocks": 1,
        "channels": 16,
    }
    config.task = {"name": "own_loss"}
    config.data = {
        "name": "examples.alphafold:data",
        "code": FILES,
        "path": f"{FILES}/PRODIGYdataset",
        "train": ("1A2K:A", "1I2M:A"),
        "held_out": ("1HE8:A",),
        "length": 12,
    }
    config.optimizer.clip_norm = 0.1  # As published; there for each example.
    return config


def model(
    num_outputs: int,
    axis_name: str | None,
    *,
    code: str,
    name: str = "model_3",
    blocks: int | None = None,
    channels: int | None = None,
    recycle: int = 1,
) -> hk.Transformed:
    """Loss of one protein, and the loss of each head.

    Args:
      code: folder of the unpacked wheel.
      name: of its configurations; model_3 to model_5 have no templates.
      blocks: number of Evoformer's, less than published; None for all 48.
      channels: width of its representations; None for those published.
      recycle: recycled calls of the network, before the one that has the loss.
    """
    del num_outputs, axis_name
    theirs = modules(code)
    config = theirs.config.model_config(name).model
    config.num_recycle = recycle
    config.global_config.use_remat = True
    evoformer, heads = config.embeddings_and_evoformer, config.heads
    if blocks is not None:
        evoformer.evoformer_num_block = evoformer.extra_msa_stack_num_block = blocks
        heads.structure_module.num_layer = blocks
    if channels is not None:
        for key in CHANNELS:
            evoformer[f"{key}_channel"] = channels
        heads.structure_module.num_channel = channels

    def forward(protein: dict[str, jax.Array], is_training: bool) -> tuple:
        # Their documentation has these two the other way round. No ensembles: those
        # are a while_loop, which has no gradient.
        net = theirs.modules.AlphaFold(config)
        outputs, (loss,) = net(protein, is_training, compute_loss=True)
        kept = {k: x["loss"] for k, x in outputs.items() if "loss" in x}
        return loss, kept

    return hk.transform(forward)


@functools.cache
def modules(code: str) -> SimpleNamespace:
    """Imports AlphaFold's modules from the unpacked wheel; they need no TensorFlow."""
    if not Path(code, "alphafold").is_dir():
        raise ConfigError(f"{code} holds no alphafold; try `make published`")
    # Code of 2021: Python and NumPy removed these; what JAX removed is `compat`'s.
    vars(collections).setdefault("Iterable", collections.abc.Iterable)
    vars(np).setdefault("int", int)
    tree = {"map_structure": jax.tree.map, "flatten": jax.tree.leaves}
    names = ("config", "modules", "all_atom", "quat_affine", "utils")
    # The wheel lacks what it needs TensorFlow for; its config takes names from there.
    with published.stand_ins("alphafold.model.tf", tree=tree):
        found = {
            name: published.import_module(f"alphafold.model.{name}", code)
            for name in names
        }
        constants = published.import_module("alphafold.common.residue_constants", code)
    gather = found["utils"].batched_gather  # Of lists, too, which JAX takes no more.
    found["utils"].batched_gather = lambda params, *args, **kwargs: gather(
        jnp.asarray(params), *args, **kwargs
    )
    with contextlib.chdir(code):  # Where it looks for stereo_chemical_props.txt.
        constants.load_stereo_chemical_props()
    return SimpleNamespace(**found, constants=constants)


def data(
    spec: BatchSpec,
    *,
    code: str,
    path: str,
    train: tuple[str, ...],
    held_out: tuple[str, ...],
    length: int,
    recycle: int = 1,
) -> Data:
    """The first `length` residues of chains of PDB files, each a `FILE:A`."""
    parts = []
    for names in (train, held_out):
        chains = (read(code, path, name, length) for name in names)
        parts.append([protein(code, *chain, calls=recycle + 1) for chain in chains])
    # One length; what is of another dimension first, a call, is the same for all.
    return bucketed(parts[0], spec, (recycle + 1,), evaluation=parts[1])


def read(code: str, path: str, name: str, length: int) -> tuple[np.ndarray, ...]:
    """Reads a chain from ATOM records: kinds [L], atoms [L, 37, 3], mask [L, 37]."""
    constants = modules(code).constants
    file, chain = name.split(":")
    residues: dict[str, tuple[int, dict[str, list[float]]]] = {}
    for line in (Path(path) / f"{file}.pdb").read_text().splitlines():
        kind = constants.resname_to_idx.get(line[17:20])
        atom = line[12:16].strip()
        if line[:4] == "ATOM" and line[21] == chain and kind is not None:
            _, atoms = residues.setdefault(line[22:27], (kind, {}))
            if atom in constants.atom_order:
                atoms.setdefault(atom, [float(line[i : i + 8]) for i in (30, 38, 46)])
    kept = [*residues.values()][:length]
    if len(kept) < length:
        raise ConfigError(f"{path}/{file}.pdb has {len(kept)} residues of {name}")
    positions = np.zeros((length, 37, 3), np.float32)
    mask = np.zeros((length, 37), np.float32)
    for i, (_, atoms) in enumerate(kept):
        for atom, place in atoms.items():
            positions[i, constants.atom_order[atom]] = place
            mask[i, constants.atom_order[atom]] = 1
    return np.array([kind for kind, _ in kept], np.int32), positions, mask


def protein(
    code: str, kinds: np.ndarray, positions: np.ndarray, mask: np.ndarray, calls: int
) -> dict[str, np.ndarray]:
    """Features of one protein, [R, ...]: of its sequence, and of its structure."""
    one = sequence(kinds) | structure(code, kinds, positions, mask)
    one["num_iter_recycling"] = np.int32(calls - 1)
    return {name: np.stack([np.asarray(x)] * calls) for name, x in one.items()}


def sequence(kinds: np.ndarray) -> dict[str, np.ndarray]:
    """Features of a sequence without an alignment, every seventh residue masked."""
    length, msa = len(kinds), kinds[None]
    masked = (np.arange(length) % 7 == 3)[None]
    letters = np.eye(23, dtype=np.float32)[np.where(masked, 22, msa)]
    none = np.zeros((1, length, 1), np.float32)
    parts = (letters, none, none, letters, none)  # Deletions, profile, their mean.
    target = np.concatenate([none[0], np.eye(21, dtype=np.float32)[kinds]], axis=1)
    ones = np.ones((1, length), np.float32)
    return {
        "aatype": kinds,
        "residue_index": np.arange(length, dtype=np.int32),
        "seq_length": np.int32(length),
        "seq_mask": ones[0],
        "target_feat": target,
        "msa_feat": np.concatenate(parts, axis=2),
        "msa_mask": ones,
        "true_msa": msa,
        "bert_mask": masked.astype(np.float32),
        "extra_msa": msa,
        "extra_msa_mask": ones,
        "extra_has_deletion": none[..., 0],
        "extra_deletion_value": none[..., 0],
    }


def structure(
    code: str, kinds: np.ndarray, positions: np.ndarray, mask: np.ndarray
) -> dict[str, np.ndarray]:
    """Features of a structure that the loss asks for, of its atoms."""
    theirs = modules(code)
    constants, all_atom = theirs.constants, theirs.all_atom
    three = [constants.restype_1to3.get(x, "UNK") for x in constants.restypes_with_x]
    names = [constants.restype_name_to_atom14_names[x] for x in three]
    # [21, 14] and back, [21, 37]: the place of an atom of a kind in the other form.
    to37 = np.array([[constants.atom_order.get(x, 0) for x in row] for row in names])
    exists14 = np.array([[bool(x) for x in row] for row in names], np.float32)[kinds]
    index = to37[kinds].astype(np.int32)
    to14 = [
        [row.index(x) if x in row else 0 for x in constants.atom_types] for row in names
    ]
    places = {"residx_atom14_to_atom37": index}
    places["residx_atom37_to_atom14"] = np.array(to14, np.int32)[kinds]
    gt_exists = exists14 * np.take_along_axis(mask, index, axis=1)
    gt = np.take_along_axis(positions, index[..., None], axis=1) * gt_exists[..., None]
    # As its get_alt_atom14, which multiplies a tuple by an array.
    swapped = np.asarray(all_atom.RENAMING_MATRICES)[kinds]  # [L, 14, 14]
    alt = np.einsum("lac,lab->lbc", gt, swapped)
    alt_exists = np.einsum("la,lab->lb", gt_exists, swapped)
    ambiguous = np.array(
        [
            [x in {*swaps, *swaps.values()} for x in row]
            for row, swaps in zip(
                names,
                [constants.residue_atom_renaming_swaps.get(x, {}) for x in three],
                strict=True,
            )
        ],
        np.float32,
    )
    frames = all_atom.atom37_to_frames(kinds, positions, mask)
    batch = kinds[None], positions[None], mask[None]
    torsions = all_atom.atom37_to_torsion_angles(*batch)
    sine, cosine = np.moveaxis(torsions["torsion_angles_sin_cos"][0, :, 3:], -1, 0)
    n, ca, c = (constants.atom_order[x] for x in ("N", "CA", "C"))
    rotation, translation = theirs.quat_affine.make_transform_from_reference(
        *(positions[:, atom] for atom in (n, ca, c))
    )
    quaternion = theirs.quat_affine.rot_to_quat(rotation, unstack_inputs=True)
    beta, beta_mask = theirs.modules.pseudo_beta_fn(kinds, positions, mask)
    made = (
        places
        | frames
        | {
            "all_atom_positions": positions,
            "all_atom_mask": mask,
            "atom37_atom_exists": constants.STANDARD_ATOM_MASK[kinds],
            "atom14_atom_exists": exists14,
            "atom14_gt_exists": gt_exists,
            "atom14_gt_positions": gt,
            "atom14_alt_gt_positions": alt,
            "atom14_alt_gt_exists": alt_exists,
            "atom14_atom_is_ambiguous": ambiguous[kinds],
            "backbone_affine_tensor": np.concatenate([quaternion, translation], axis=1),
            "backbone_affine_mask": mask[:, n] * mask[:, ca] * mask[:, c],
            "chi_angles": np.arctan2(sine, cosine),
            "chi_mask": torsions["torsion_angles_mask"][0, :, 3:],
            "pseudo_beta": beta,
            "pseudo_beta_mask": beta_mask,
            "resolution": np.float32(2.0),
            "use_clamped_fape": np.float32(1.0),
        }
    )
    return {
        name: np.asarray(x, None if np.asarray(x).dtype.kind in "ib" else np.float32)
        for name, x in made.items()
    }
