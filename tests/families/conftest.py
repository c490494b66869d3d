"""No deadline for drawn examples: a shared machine may be slow, and slowness is not what these tests are about."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
