"""Running a built model: prefill, sampling, decoding, streamed text.

The package is itself callable: `asbuilt.generate(model, text)`.
"""

from asbuilt.packages import make_callable

make_callable(__name__)
