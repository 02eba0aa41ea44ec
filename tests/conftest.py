"""Settings for all tests."""

import os

from hypothesis import settings

# No test asserts a time, so none has a deadline. On a build server the examples are the same each time: what a random one
# finds there would stop a change that has nothing to do with it. By hand they are new each time, and find it here.
settings.register_profile("default", deadline=None)
settings.register_profile("server", deadline=None, derandomize=True)
settings.load_profile("server" if os.environ.get("CI") else "default")
