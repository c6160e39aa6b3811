"""Capture values from inside PyTorch models that run compiled."""

from fxcapture import errors as errors
from fxcapture import reductions as reductions
from fxcapture.attention_tap import AttentionWeights as AttentionWeights
from fxcapture.captured_program import CapturedPackage as CapturedPackage
from fxcapture.captured_program import CapturedProgram as CapturedProgram
from fxcapture.captured_program import export as export
from fxcapture.captured_program import load as load
from fxcapture.captured_program import load_package as load_package
from fxcapture.dynamo_backend import Recording as Recording
from fxcapture.dynamo_backend import backend as backend
from fxcapture.dynamo_backend import recording as recording
from fxcapture.frontends.functional import functional as functional
from fxcapture.instrument import CapturedGraph as CapturedGraph
from fxcapture.instrument import instrument as instrument
from fxcapture.memory import Estimate as Estimate
from fxcapture.memory import estimate as estimate
from fxcapture.modeling import OutputRecorder as OutputRecorder
from fxcapture.modeling import capture_outputs as capture_outputs
from fxcapture.modeling import merge_with_config_defaults as merge_with_config_defaults
from fxcapture.modeling import select_hidden_states as select_hidden_states
from fxcapture.patching import patch_output_recorders as patch_output_recorders
from fxcapture.patching import register_patch_mapping as register_patch_mapping
from fxcapture.patching import unregister_patch_mapping as unregister_patch_mapping
from fxcapture.program import CapturedModule as CapturedModule
from fxcapture.program import compile as compile
from fxcapture.records import Captured as Captured
from fxcapture.records import Records as Records
from fxcapture.spec import CaptureSpec as CaptureSpec
from fxcapture.spec import Tap as Tap
from fxcapture.survey import Survey as Survey
from fxcapture.survey import sites as sites
from fxcapture.testing import Verification as Verification
from fxcapture.testing import verify as verify

__version__ = "0.1.0"

__all__ = [
    "AttentionWeights",
    "CaptureSpec",
    "Captured",
    "CapturedGraph",
    "CapturedModule",
    "CapturedPackage",
    "CapturedProgram",
    "Estimate",
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
    "merge_with_config_defaults",
    "patch_output_recorders",
    "recording",
    "reductions",
    "register_patch_mapping",
    "select_hidden_states",
    "sites",
    "unregister_patch_mapping",
    "verify",
]
