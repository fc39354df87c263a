"""Pretrained parameters in files of others: safetensors, NumPy's, Orbax trees."""

from haiku_template.pretrained.archive import export_npz as export_npz
from haiku_template.pretrained.converting import convert as convert
from haiku_template.pretrained.npz import dtype_name as dtype_name
from haiku_template.pretrained.published import BESIDE as BESIDE
from haiku_template.pretrained.published import MARK as MARK
from haiku_template.pretrained.published import Names as Names
from haiku_template.pretrained.published import read_published as read_published
from haiku_template.pretrained.reading import read as read
from haiku_template.pretrained.tensors import Tensor as Tensor
from haiku_template.pretrained.writing import check_new as check_new
from haiku_template.pretrained.writing import new_file as new_file
from haiku_template.pretrained.writing import new_folder as new_folder
from haiku_template.pretrained.writing import save_tensors as save_tensors
from haiku_template.pretrained.writing import to_json as to_json
