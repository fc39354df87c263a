"""Structures as the example reads them; nothing is fetched."""

import numpy as np
import pytest

from configs import finetune_proteinmpnn
from examples import proteinmpnn
from haiku_template import config as configs
from haiku_template.errors import ConfigError


def atom(name, residue, chain, number, x=0.0, other=" "):
    place = f"{x:8.3f}{1.5:8.3f}{-2.25:8.3f}"
    return f"ATOM      1  {name:3}{other}{residue} {chain}{number:4}    {place}  1.00"


def residue(name, chain, number, atoms=("N", "CA", "C", "O"), **more):
    return [atom(a, name, chain, number, **more) for a in atoms]


@pytest.fixture
def folder(tmp_path):
    lines = residue("ALA", "A", 3, x=1.0, other="A")
    lines += residue("ALA", "A", 3, x=9.0, other="B")  # Another position of it.
    lines += residue("TYR", "A", 4, atoms=("N", "CA", "C"))  # Without its O.
    lines += residue("XYZ", "A", 6) + residue("VAL", "A", 7) + residue("GLY", "B", 8)
    (tmp_path / "1ABC.pdb").write_text("\n".join(["REMARK", *lines, "TER"]))
    return str(tmp_path)


def test_whole_residues_of_a_chain_are_read(folder):
    found = proteinmpnn.read(folder, "1ABC:A")
    assert "".join(proteinmpnn.LETTERS[i] for i in found["S"]) == "AXV"
    np.testing.assert_array_equal(found["residue_idx"], [3, 6, 7])
    np.testing.assert_array_equal(found["X"][0, :, 0], [1, 1, 1, 1])
    assert found["X"].shape == (3, 4, 3) and found["X"].dtype == np.float32
    assert {len(array) for array in found.values()} == {3}


def test_a_name_may_have_the_first_and_last_residue(folder):
    found = proteinmpnn.read(folder, "1ABC:A:4-6")
    np.testing.assert_array_equal(found["residue_idx"], [6])


@pytest.mark.parametrize("name", ["1ABC:C", "1ABC:A:100-200"])
def test_a_name_without_residues_is_an_error(folder, name):
    with pytest.raises(ConfigError, match=f"1ABC.pdb has no residues of {name}"):
        proteinmpnn.read(folder, name)


def test_code_that_was_not_fetched_is_an_error_that_says_how(tmp_path):
    with pytest.raises(ConfigError, match=r"config.model.code=.*make published"):
        proteinmpnn.model(0, None, code=str(tmp_path / "none"))


def test_the_config_fits_the_functions_that_it_names():
    configs.check(finetune_proteinmpnn.get_config())
    letters = dict(zip(proteinmpnn.NAMES.split(), proteinmpnn.LETTERS, strict=False))
    assert len(letters) == 20 and letters["TRP"] == "W" and letters["GLN"] == "Q"
