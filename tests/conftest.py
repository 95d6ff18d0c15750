"""What all tests share."""

from hypothesis import settings

# A test is wrong for what it finds, not for how busy the machine was; and a failure must be found again the same way.
settings.register_profile("evenload", deadline=None, derandomize=True)
settings.load_profile("evenload")
