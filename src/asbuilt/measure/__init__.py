"""Measuring built models: each measured figure beside the predicted one.

The package is itself callable: `asbuilt.measure(model)`.
"""

from asbuilt.measure.calibrate import calibrate
from asbuilt.measure.machine import this_machine
from asbuilt.measure.rates import Calibration
from asbuilt.measure.report import Report, Row, Text, counted, in_format, measure
from asbuilt.packages import make_callable

__all__ = ["Calibration", "Report", "Row", "Text", "calibrate", "counted", "in_format", "measure", "this_machine"]

make_callable(__name__)
