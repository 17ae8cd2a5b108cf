# SPDX-License-Identifier: Apache-2.0
"""The one exception of our own."""


class UnavailableError(RuntimeError):
    """This machine or this build does not have an isa, an engine or a library.

    The text says why, and what is there instead. It is a RuntimeError.

    Example:
        >>> from cpu_attn import UnavailableError, get_kv_cache_shape, isas
        >>> missing = [isa.name for isa in isas() if not isa.supported]
        >>> try:
        ...     get_kv_cache_shape(4, 16, 2, 64, "float32", isa=missing[0] if missing else "scalar")
        ... except UnavailableError as error:
        ...     reason = str(error)
        ... else:
        ...     reason = "every isa is here"
    """
