"""Decorators for the authors of model classes."""

from fxcapture.modeling.decorators import OutputRecorder as OutputRecorder
from fxcapture.modeling.decorators import capture_outputs as capture_outputs
from fxcapture.modeling.decorators import convert_outputs as convert_outputs
from fxcapture.modeling.decorators import declared_spec as declared_spec
from fxcapture.modeling.decorators import inject_records as inject_records
from fxcapture.modeling.decorators import (
    merge_with_config_defaults as merge_with_config_defaults,
)
from fxcapture.modeling.decorators import select_hidden_states as select_hidden_states

__all__ = [
    "OutputRecorder",
    "capture_outputs",
    "convert_outputs",
    "declared_spec",
    "inject_records",
    "merge_with_config_defaults",
    "select_hidden_states",
]
