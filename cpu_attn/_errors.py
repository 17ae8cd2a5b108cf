# SPDX-License-Identifier: Apache-2.0
"""The one exception of our own."""


class UnavailableError(RuntimeError):
    """An isa or engine that this machine or this build does not have; says what is there instead."""
