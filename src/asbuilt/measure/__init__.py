"""Running what was built, and printing the measured figure beside the predicted one."""

from asbuilt.measure.calibrate import calibrate
from asbuilt.measure.machine import this_machine
from asbuilt.measure.rates import Calibration
from asbuilt.measure.report import Report, Row, counted, measure

__all__ = ["Calibration", "Report", "Row", "calibrate", "counted", "measure", "this_machine"]
