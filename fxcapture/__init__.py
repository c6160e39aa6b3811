"""Capture values from inside PyTorch models that run compiled."""

from fxcapture.program import CapturedModule as CapturedModule
from fxcapture.program import compile as compile
from fxcapture.records import Captured as Captured
from fxcapture.records import Records as Records
from fxcapture.spec import CaptureSpec as CaptureSpec
from fxcapture.spec import Tap as Tap
from fxcapture.testing import Verification as Verification
from fxcapture.testing import verify as verify

__version__ = "0.1.0"

__all__ = [
    "CaptureSpec",
    "Captured",
    "CapturedModule",
    "Records",
    "Tap",
    "Verification",
    "compile",
    "verify",
]
