"""Running a built model: caches, sampling, decoding, text as it comes.

The package is itself callable: `asbuilt.generate(model, text)`.
"""

from asbuilt.packages import make_callable

make_callable(__name__)
