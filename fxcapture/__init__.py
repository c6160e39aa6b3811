"""Capture values from inside PyTorch models that run compiled."""

from fxcapture import errors as errors
from fxcapture import reductions as reductions
from fxcapture.exporting.export import export as export
from fxcapture.exporting.package import CapturedPackage as CapturedPackage
from fxcapture.exporting.package import load_package as load_package
from fxcapture.exporting.program import CapturedProgram as CapturedProgram
from fxcapture.exporting.program import load as load
from fxcapture.foreign.backend import Recording as Recording
from fxcapture.foreign.backend import backend as backend
from fxcapture.foreign.backend import recording as recording
from fxcapture.foreign.instrument import CapturedGraph as CapturedGraph
from fxcapture.foreign.instrument import instrument as instrument
from fxcapture.inspect.estimate import Estimate as Estimate
from fxcapture.inspect.estimate import estimate as estimate
from fxcapture.inspect.inside import FunctionSurvey as FunctionSurvey
from fxcapture.inspect.survey import Survey as Survey
from fxcapture.inspect.survey import sites as sites
from fxcapture.modeling.decorators import OutputRecorder as OutputRecorder
from fxcapture.modeling.decorators import capture_outputs as capture_outputs
from fxcapture.modeling.decorators import (
    merge_with_config_defaults as merge_with_config_defaults,
)
from fxcapture.modeling.decorators import select_hidden_states as select_hidden_states
from fxcapture.modeling.patching import patch_output_recorders as patch_output_recorders
from fxcapture.modeling.patching import register_patch_mapping as register_patch_mapping
from fxcapture.modeling.patching import (
    unregister_patch_mapping as unregister_patch_mapping,
)
from fxcapture.plan.records import Captured as Captured
from fxcapture.plan.records import Records as Records
from fxcapture.plan.records import load_records as load_records
from fxcapture.runtime.captured_module import CapturedModule as CapturedModule
from fxcapture.runtime.captured_module import compile as compile
from fxcapture.runtime.functional import functional as functional
from fxcapture.spec.attention_tap import AttentionScores as AttentionScores
from fxcapture.spec.attention_tap import AttentionWeights as AttentionWeights
from fxcapture.spec.capture_spec import CaptureSpec as CaptureSpec
from fxcapture.spec.tap import Tap as Tap
from fxcapture.testing import Verification as Verification
from fxcapture.testing import verify as verify
from fxcapture.trace.listen import named as named

__version__ = "0.1.0"

__all__ = [
    "AttentionScores",
    "AttentionWeights",
    "CaptureSpec",
    "Captured",
    "CapturedGraph",
    "CapturedModule",
    "CapturedPackage",
    "CapturedProgram",
    "Estimate",
    "FunctionSurvey",
    "OutputRecorder",
    "Recording",
    "Records",
    "Survey",
    "Tap",
    "Verification",
    "backend",
    "capture_outputs",
    "compile",
    "errors",
    "estimate",
    "export",
    "functional",
    "instrument",
    "load",
    "load_package",
    "load_records",
    "merge_with_config_defaults",
    "named",
    "patch_output_recorders",
    "recording",
    "reductions",
    "register_patch_mapping",
    "select_hidden_states",
    "sites",
    "unregister_patch_mapping",
    "verify",
]
