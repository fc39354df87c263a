"""Finished runs: evaluation, predictions, export."""

from haiku_template.runs.export import export_adapters, export_safetensors
from haiku_template.runs.predictions import write_predictions
from haiku_template.runs.run import Run
from haiku_template.runs.stablehlo import export_forward, export_stablehlo

__all__ = [
    "Run",
    "export_adapters",
    "export_forward",
    "export_safetensors",
    "export_stablehlo",
    "write_predictions",
]
