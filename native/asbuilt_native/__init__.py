"""Where the library of native kernels lies; asbuilt.kernels.native loads it."""

from __future__ import annotations

from pathlib import Path

LIBRARY = next((path for path in Path(__file__).parent.glob("*asbuilt_kernels.*")), None)
