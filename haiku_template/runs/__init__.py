"""Runs: the training loop, and what is done with a finished run."""

from haiku_template.runs.early_stop import early_stop as early_stop
from haiku_template.runs.export import export_adapters as export_adapters
from haiku_template.runs.export import export_npz as export_npz
from haiku_template.runs.export import export_safetensors as export_safetensors
from haiku_template.runs.loop import Event as Event
from haiku_template.runs.loop import Result as Result
from haiku_template.runs.loop import train as train
from haiku_template.runs.onnx import export_onnx as export_onnx
from haiku_template.runs.predictions import write_predictions as write_predictions
from haiku_template.runs.run import Run as Run
from haiku_template.runs.stablehlo import export_forward as export_forward
from haiku_template.runs.stablehlo import export_stablehlo as export_stablehlo
from haiku_template.runs.verification import verify as verify
from haiku_template.training import Experiment as Experiment  # What a script needs.
