"""AlphaFold 2's own loss, of the package index's copy of its code, random weights.

Run by `make test-published`; its modules take two minutes to compile on two cores.
"""

from pathlib import Path

import jax
import numpy as np
import pytest

from examples import alphafold
from haiku_template import compat
from haiku_template import config as configs
from haiku_template.params import flatten
from haiku_template.pretrained import export_npz
from haiku_template.training import Experiment
from tests.runs import run_steps

pytestmark = pytest.mark.published

FILES = Path(alphafold.FILES)
CHAIN = "1A2K:A"


@pytest.fixture(scope="module", autouse=True)
def put_back():
    compat.install()


def test_the_structure_gives_its_atoms_back():
    """Frames and angles of the features, and ideal bonds, place each atom."""
    theirs = alphafold.modules(str(FILES))
    from alphafold.model import r3

    path = str(FILES / "PRODIGYdataset")
    kinds, positions, mask = alphafold.read(str(FILES), path, CHAIN, 60)
    made = alphafold.structure(str(FILES), kinds, positions, mask)
    affine = theirs.quat_affine.QuatAffine.from_tensor(made["backbone_affine_tensor"])
    batch = kinds[None], positions[None], mask[None]
    angles = theirs.all_atom.atom37_to_torsion_angles(*batch)["torsion_angles_sin_cos"]
    frames = theirs.all_atom.torsion_angles_to_frames(
        kinds, r3.rigids_from_quataffine(affine), angles[0]
    )
    atoms = theirs.all_atom.frames_and_literature_positions_to_atom14_pos(kinds, frames)
    atoms, there = np.stack(atoms, axis=-1), made["atom14_gt_exists"] > 0
    apart = np.linalg.norm(atoms - made["atom14_gt_positions"], axis=-1)[there]
    assert there.sum() > 400 and apart.mean() < 0.15  # In angstroms.
    # Of symmetric ends, such as of Asp, other names are the same atoms.
    swapped = np.abs(made["atom14_alt_gt_positions"] - made["atom14_gt_positions"])
    moved = swapped.sum(axis=-1) > 0
    assert moved.sum() > 10 and not moved[made["atom14_atom_is_ambiguous"] == 0].any()


def test_its_loss_trains_and_its_own_loader_reads_what_was_trained(
    one_device, tmp_path
):
    config = alphafold.get_config()
    configs.check(config)
    trainer = Experiment.from_config(config, one_device).trainer(one_device)
    state, (first, second) = run_steps(trainer, 2)
    # Its heads begin at zero: cross-entropies of as many bins as each has.
    bins = {"distogram": 64, "masked_msa": 23, "predicted_lddt": 50}
    bins["experimentally_resolved"] = 2
    for name, count in bins.items():
        assert float(first[name]) == pytest.approx(np.log(count), rel=1e-4)
    heads = {k: float(first[k]) for k in (*bins, "structure_module")}
    weights = {"distogram": 0.3, "masked_msa": 2.0, "structure_module": 1.0}
    total = sum(weights.get(k, 0.01) * x for k, x in heads.items())
    assert float(first["loss"]) == pytest.approx(total, rel=1e-5)
    assert float(first["grad_norm"]) > 0.01 and np.isfinite(float(second["loss"]))
    assert abs(float(second["distogram"]) - np.log(64)) > 1e-5

    params = state.params
    file = tmp_path / "params_model_3.npz"
    export_npz(file, flatten(params), params, None, one_device, "alphafold")
    loader = alphafold.modules(str(FILES)).utils.flat_params_to_haiku
    with np.load(file) as arrays:
        read = loader(dict(arrays))
    assert {*read} == {*params} and all("alphafold" in name for name in read)
    jax.tree.map(np.testing.assert_array_equal, read, one_device.fetch(params))
