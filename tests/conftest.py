"""Settings of all tests."""

import contextlib

# An example may take as long as the machine has other things to do: how long it took says nothing about what is tested.
with contextlib.suppress(ImportError):  # where only some tests are to run
    from hypothesis import settings

    settings.register_profile("kvern", deadline=None)
    settings.load_profile("kvern")
